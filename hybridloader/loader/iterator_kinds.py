"""Choice of the iterator of a loader: the plain one, or one that does more for whoever asked for it."""

from __future__ import annotations

from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from hybridloader.loader.iterator import LoaderIterator
from hybridloader.loader.plan import LoaderPlan
from hybridloader.observe.headroom import running_reuse


def iterator_of(loader: Any, plan: LoaderPlan) -> _BaseDataLoaderIter:
    """Make the iterator that the options of a loader, and the command, ask for."""
    reuse = running_reuse()
    if reuse is not None:
        from hybridloader.loader.reusing_iterator import reusing_iterator

        if plan.record.kept is None:
            plan.record.kept = reuse.batches_of(loader)
        return reusing_iterator(loader, plan, plan.record.kept)
    return LoaderIterator(loader, plan)
