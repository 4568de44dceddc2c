"""Fetcher of a worker that resumes: its dataset is brought to where it was when the state was taken."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hybridloader._support.state_copies import load_into
from hybridloader.engine.dataset_state import ShardStart
from hybridloader.engine.fetcher import Fetch, Fetcher, TaskContext


def resumed_fetcher(fetch: Fetch, start: ShardStart, context: TaskContext) -> Fetcher:
    """Return the fetcher of a worker that begins at `start`.

    The dataset gets its state before the fetcher is opened, as in torchdata.
    """
    if start.dataset is not None:
        load_into(fetch.dataset, pickle.loads(start.dataset.kept), "the dataset")
    fetcher = fetch.open(None, context)
    if start.behind and start.iterator is not None:
        fetcher.resume(start)
        fetcher = fetch.open(None, context)
    fetcher.resume(start._replace(iterator=None, ended=False) if start.behind else start)
    _do_again(fetcher, start.again, context)
    if fetcher.states is not None and start.stateful and not start.behind:
        fetcher.states.go_on(start.results_since)
    return fetcher


def _do_again(fetcher: Fetcher, tasks: Sequence[Any], context: TaskContext) -> None:
    """Repeat the tasks since the state was taken, to bring the dataset to the same place."""
    for task in tasks:
        if context.cancelled:
            return
        with suppress(Exception):  # it was a result then, and what raises now does so when asked
            if context.rng is None:
                fetcher.fetch(task)
            else:
                context.rng.task(fetcher.key, fetcher.fetch, task)
        context.extras = None
