"""Fetch of a loader: its dataset, `collate_fn` and options, as workers of its backend get them."""

from __future__ import annotations

import types
import weakref
from typing import Any

import torch.utils.data
from torch.utils.data import IterDataPipe, MapDataPipe

from hybridloader._support.caller import warn_once
from hybridloader.engine.contract import Backend
from hybridloader.engine.fetcher import Abandoned, Fetch
from hybridloader.fetching.collate import without_torch
from hybridloader.fetching.on_error.policies import Policy
from hybridloader.fetching.readers import IterableFetch, MapFetch
from hybridloader.loader.plan import LoaderPlan


class _WeakLoaderMethod:
    """Method of a loader, such as its `collate_fn`, that does not keep the loader alive.

    Otherwise a worker thread would keep the loader, and with persistent workers the iterator, alive
    for ever. The iterator holds the method itself as long as it lives.
    """

    def __init__(self, method: types.MethodType) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, argument: Any) -> Any:
        method = self._method()
        if method is None:
            raise Abandoned
        return method(argument)


def for_workers(function: Any, backend: Backend) -> Any:
    """Return `function` as workers of `backend` get it."""
    if not backend.in_process:
        return without_torch(function)
    method = isinstance(function, types.MethodType)
    of_a_loader = method and isinstance(function.__self__, torch.utils.data.DataLoader)
    return _WeakLoaderMethod(function) if of_a_loader else function


def fetch_of(
    plan: LoaderPlan,
    backend: Backend,
    on_error: Policy | None,
    *,
    sends_states: bool,  # the dataset's state goes with results
) -> Fetch:
    """Return the fetch of a loader's workers; warn if its threads would have nothing to do."""
    dataset, collate_fn = plan.dataset, for_workers(plan.collate_fn, backend)
    if plan.iterable:
        return IterableFetch(
            dataset,
            collate_fn,
            plan.batched,
            plan.drop_last,
            isinstance(dataset, IterDataPipe),
            on_error,
            join=plan.joins,
            state_every=plan.state_every,
        )
    fetch = MapFetch(
        dataset,
        collate_fn,
        plan.batched,
        isinstance(dataset, MapDataPipe),
        plan.options.threads_per_worker,
        on_error,
        sends_states=sends_states,
        state_every=plan.state_every,
    )
    if fetch.idle_threads:
        warn_once(
            f"threads_per_worker has no effect for {type(dataset).__name__}: its __getitems__ is "
            "asked for a whole batch at once. Raise num_workers, or use threads in __getitems__."
        )
    return fetch
