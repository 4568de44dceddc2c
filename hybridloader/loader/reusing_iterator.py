"""Iterators of a loader that loads a few batches and returns them again, for ``run --headroom``."""

from __future__ import annotations

from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from hybridloader.loader.iterator import LoaderIterator
from hybridloader.loader.plan import LoaderPlan
from hybridloader.observe.headroom_trials import KeptBatches, running_reuse


class ReusingIterator(LoaderIterator):
    """Iterator that loads some batches, and then returns these again, without workers."""

    def __init__(self, loader: Any, plan: LoaderPlan, kept: KeptBatches) -> None:
        self._kept = kept
        kept.begin()
        super().__init__(loader, plan)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._kept.begin()
        if self._kept.enough:
            _BaseDataLoaderIter._reset(self, loader, first_iter)
        else:
            super()._reset(loader, first_iter)

    def _next_data(self) -> Any:
        kept = self._kept
        if kept.enough:
            return kept.again()
        batch = super()._next_data()
        if kept.keep(batch):
            self.close()  # workers would take cores from the steps
            kept.times.mark()
        return batch


class ReplayIterator(_BaseDataLoaderIter):
    """Iterator over batches that are already in memory."""

    def __init__(self, loader: Any, kept: KeptBatches) -> None:
        super().__init__(loader)
        self._kept = kept
        kept.begin()

    def _next_data(self) -> Any:
        return self._kept.again()

    def close(self) -> None:
        """Do nothing: there are no workers."""


def iterator_of(loader: Any, plan: LoaderPlan) -> _BaseDataLoaderIter:
    """Make the iterator of a loader: one that reuses batches, if the command asks for that."""
    reuse = running_reuse()
    if reuse is None:
        return LoaderIterator(loader, plan)
    kept = plan.record.kept
    if kept is None:
        kept = plan.record.kept = reuse.batches_of(loader)
    return ReplayIterator(loader, kept) if kept.enough else ReusingIterator(loader, plan, kept)
