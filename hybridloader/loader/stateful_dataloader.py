"""`StatefulDataLoader`, a replacement for torchdata's, with its order and states, on the engine.

It differs from `DataLoader` in two respects: ``shuffle=True`` draws as torchdata's sampler does, and
states have torchdata's form.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from hybridloader._support.states import copied, is_stateful, owner_of
from hybridloader._support.text import whole
from hybridloader._support.user_objects import described, length_of
from hybridloader.errors import StateError
from hybridloader.loader.dataloader import DataLoader
from hybridloader.loader.options import OptionWords, in_keywords
from hybridloader.loader.plan import LoaderPlan, record_of
from hybridloader.loader.samplers import BatchOrder, RandomOrder, steps_of
from hybridloader.loader.state import (
    OWN,
    VERSION,
    WITHIN,
    agreement,
    given,
    snapshots_of,
    state_of,
)

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from torch.utils.data import Dataset, Sampler
    from torch.utils.data.dataloader import _BaseDataLoaderIter
    from typing_extensions import Unpack

    from hybridloader.engine.contract import Backend

_OURS = inspect.signature(DataLoader).parameters


class StatefulDataLoader(DataLoader):
    """A `DataLoader` that replaces torchdata's `StatefulDataLoader`.

    Its `state_dict` has the keys and shapes of torchdata's, and `load_state_dict` takes states that
    torchdata saved. docs/frameworks/torchdata.md lists the differences.

    Parameters
    ----------
    dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, \
drop_last, timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor, \
persistent_workers, pin_memory_device, in_order
        As torchdata's, which are torch's. ``shuffle=True`` draws the order of torchdata's sampler, which
        differs from torch's.
    snapshot_every_n_steps
        Number of a worker's batches between two states of a stateful dataset. States are sent less
        often if they would take more than 2 % of the time. After a state is loaded, the batches since
        the last sent state are made again. 0 or None sends states only at the beginning and at the end
        of the worker's part. torchdata can load states taken with 1, if the dataset's `state_dict`
        takes less than 2 ms and a sampler's less than 50 us.
    backend, threads_per_worker, on_error, on_worker_death, task_timeout, seeding, device, \
observe
        As `DataLoader`'s.

    Raises
    ------
    BackendUnavailable, WorkerPicklingError, ValueError
        As `DataLoader`'s.

    Examples
    --------
    >>> import torch
    >>> from hybridloader import StatefulDataLoader
    >>> data = torch.utils.data.TensorDataset(torch.arange(6))
    >>> loader = StatefulDataLoader(data, 2, num_workers=2, backend="threads")
    >>> first = next(iter(loader))
    >>> state = loader.state_dict()
    >>> state["_snapshot"]["_snapshot_step"]
    1
    >>> resumed = StatefulDataLoader(data, 2, num_workers=2, backend="threads")
    >>> resumed.load_state_dict(state)
    >>> [batch.tolist() for (batch,) in resumed]
    [[2, 3], [4, 5]]
    """

    _begun = False
    """True if `state_dict` made `_iterator`, and ``iter`` has not used it yet."""

    @property
    def _state_every(self) -> int:  # type: ignore[override]
        return self.snapshot_every_n_steps or sys.maxsize

    @in_keywords
    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int | None = 1,
        backend: str | Backend | None = None,
        **options: Unpack[OptionWords],
    ) -> None:
        passed = dict(locals())
        self.snapshot_every_n_steps = snapshot_every_n_steps
        if snapshot_every_n_steps is not None:
            whole("snapshot_every_n_steps", snapshot_every_n_steps, 0)
        ordered = sampler is not None or batch_sampler is not None
        if shuffle and not ordered and not isinstance(dataset, IterableDataset):
            passed["sampler"], passed["shuffle"] = RandomOrder(dataset, generator), None  # type: ignore[arg-type]
        super().__init__(**{n: passed[n] for n in passed.keys() & _OURS.keys()}, **options)
        if batch_sampler is None and type(self.batch_sampler) is BatchSampler:
            made = self.batch_sampler
            # torch's loader refuses a new one after its construction, and passing a `batch_sampler`
            # would remove its `batch_size`.
            vars(self)["batch_sampler"] = BatchOrder(made.sampler, made.batch_size, made.drop_last)

    def __iter__(self) -> _BaseDataLoaderIter:
        begun = self._drop_begun()
        if begun is None:
            return super().__iter__()
        if self.persistent_workers:
            self._iterator = begun
        return begun

    def _get_iterator(self) -> _BaseDataLoaderIter:
        saved = record_of(self).given
        if isinstance(saved, WorkersDiffer):
            raise saved
        return super()._get_iterator()

    def _drop_begun(self) -> _BaseDataLoaderIter | None:
        if not self._begun:
            return None
        self._begun = False
        begun, self._iterator = self._iterator, None
        return begun

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, as `DataLoader.set_epoch`; drop an unused first one."""
        self._drop_begun()
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the latest epoch, in torchdata's form.

        If there was no epoch, this begins the first one, as torchdata does; the next ``iter`` uses it.

        Raises
        ------
        StateError
            The dataset's `state_dict` raised, or its state can't be pickled.
        """
        record = record_of(self)
        if record.progress is None and record.loaded is None:
            self._iterator = self._get_iterator()
            self._begun = True
        if record.given is not None and not isinstance(record.given, WorkersDiffer):
            if record.loaded is not None:  # not used yet
                return dict(copied(record.given))
            record.given = None
        plan = self._plan_ahead()
        return written(plan, state_of(plan, stays=self._iterator is not None))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from `state_dict` at the next ``iter()``.

        Parameters
        ----------
        state_dict
            Result of `state_dict`, of this class or of torchdata's. ``{}`` means no state.

        Raises
        ------
        StateError
            A `ValueError`: the state is of another kind of loader, or was truncated; the message names
            the field. For another number of workers ``iter`` raises the error, which is then also an
            `AssertionError`, as in torchdata.
        """
        self._drop_begun()
        record = record_of(self)
        try:
            super().load_state_dict(read(self._plan_ahead(), state_dict))
            record.given = copied(dict(state_dict))
        except WorkersDiffer as error:  # raised by `iter`
            super().load_state_dict({})
            record.given = error


# -- States in torchdata's form, which has two shapes, one without workers and one with workers.
#
# The state of the `DataLoader` is in it, under one key that torchdata ignores, `OWN`.
# That is the state which is loaded, with the counts that frameworks edit. A state without that key was
# saved by torchdata. It has no state of torch's generators, so these stay as they are, as in torchdata.


_SHARED = ("_sampler_iter_yielded", "_IterableDataset_len_called", "_shared_seed")
"""Keys of both of torchdata's shapes that the state of a `DataLoader` has under the same names."""


class WorkersDiffer(StateError, AssertionError):
    """The state is of another number of workers, each of which has a part. torchdata asserts this."""


# -- writing -----------------------------------------------------------------------------------------


def written(plan: LoaderPlan, own: dict[str, Any]) -> dict[str, Any]:
    """Return `own`, a state of a `DataLoader`, in torchdata's form."""
    finished, progress = own["_iterator_finished"], plan.record.progress
    main = {name: own[name] for name in _SHARED}
    main["_index_sampler_state"], main["_sampler_iter_state"] = _sampler_states(plan, own)
    places = own["_worker_snapshots"] or {}
    if finished and progress is not None:
        # torchdata writes states of the end even if no worker stays.
        places = snapshots_of([end._replace(ended=True) for end in progress.ends()])
    more = {"state": own}
    workers = own["_num_workers"]
    readers = max(1, workers)
    names = [f"worker_{number}" for number in range(readers)]
    snapshots = {name: _worker(plan, n, places.get(name)) for n, name in enumerate(names)}
    if not workers:
        only = snapshots["worker_0"]
        state, fetcher = only["dataset_state"], only["fetcher_state"]
        itself = state is None and fetcher is not None and fetcher["dataset_iter_state"] is not None
        within = plan.iterable and not finished
        return {
            **main,
            "_num_yielded": own["_num_yielded"],
            "fetcher_state": fetcher,
            "dataset_state": state if within or itself else own["dataset_state"],
            "_iterator_finished": finished,
            OWN: more,
        }
    last = own["_last_yielded_worker_id"]
    if finished and progress is not None:
        last = progress.last_worker
    return {
        "_snapshot": {
            "_snapshot_step": own["_num_yielded"],
            "_last_yielded_worker_id": last if last >= 0 else readers - 1,
            "_main_snapshot": {
                "_num_workers": readers,
                **main,
                "_base_seed": own["_base_seed"],
            },
            "_worker_snapshots": snapshots,
        },
        "_steps_since_snapshot": 0,
        "_iterator_finished": finished,
        OWN: more,
    }


def _worker(plan: LoaderPlan, number: int, place: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "worker_id": number,
        "dataset_state": None if place is None else place["dataset_state"],
        "fetcher_state": place["fetcher_state"] if place is not None and plan.iterable else None,
    }


def _sampler_states(plan: LoaderPlan, own: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the states of the loader's sampler and of its iterator."""
    within, progress = own["_index_sampler_state"] or {}, plan.record.progress
    sampler, iterator = within.get("sampler_state"), own["_sampler_iter_state"]
    if own["_iterator_finished"] or own[OWN]["since"]:
        # torchdata writes those after the last returned item; a `DataLoader` writes earlier ones, or
        # those of the next epoch.
        at = None if progress is None else progress.at
        checkpoint = None if at is None else at[2]
        sampler = None if checkpoint is None else given(checkpoint.state.sampler)
        iterator = None if checkpoint is None else given(checkpoint.state.iterator)
    elif sampler is None and not own["_sampler_iter_yielded"]:
        sampler = copied(own[OWN]["start"])
    if plan.batch_size is None:
        # torchdata asks the iterator of the loader's own batch sampler only.
        return sampler, iterator
    samples = own["_sampler_iter_yielded"] * plan.batch_size
    if not plan.iterable:
        samples = min(samples, length_of(plan.sampler) or samples)
    found = {"samples_yielded": samples, **(iterator or {})}
    if sampler is not None:
        found["sampler_state"] = sampler
    return None, found


# -- reading -----------------------------------------------------------------------------------------


def read(plan: LoaderPlan, state: Any) -> dict[str, Any]:
    """Return `state` as one of a `DataLoader`. Raises `WorkersDiffer` for another number of workers."""
    if not isinstance(state, Mapping):
        raise StateError(f"the state of a loader is a dict, got {type(state).__name__}")
    if not state or ("_snapshot" not in state and "_num_workers" in state):
        return dict(state)  # none, or a `DataLoader`'s
    try:
        return _read(plan, state)
    except StateError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StateError(
            "the state is not from a StatefulDataLoader of torchdata or hybridloader, or was truncated "
            f"({described(error)}): {owner_of(state)}"
        ) from error


def _read(plan: LoaderPlan, state: Mapping[str, Any]) -> dict[str, Any]:
    if "_snapshot" in state:
        taken = state["_snapshot"]
        main, snapshots = taken["_main_snapshot"], dict(taken["_worker_snapshots"])
        yielded, last = taken["_snapshot_step"], taken["_last_yielded_worker_id"]
        workers, again = main["_num_workers"], state["_steps_since_snapshot"]
    else:
        main, yielded, last = {"_base_seed": 0, **state}, state["_num_yielded"], -1
        workers, again = 0, 0
        only = {name: state[name] for name in ("dataset_state", "fetcher_state")}
        snapshots = {"worker_0": {"worker_id": 0, **only}}
    _check_workers(plan, workers, snapshots)
    edited = {
        "_sampler_iter_yielded": main["_sampler_iter_yielded"],
        "_num_yielded": yielded,
        "_iterator_finished": state["_iterator_finished"],
    }
    if OWN in state:
        return {**state[OWN]["state"], **edited}
    own = {
        **{name: main[name] for name in _SHARED},
        **edited,
        "fetcher_state": None,
        "dataset_state": state.get("dataset_state"),
        "_base_seed": main["_base_seed"],
        "_num_workers": workers,
        "_last_yielded_worker_id": last,
    }
    own["_index_sampler_state"], own["_sampler_iter_state"] = _own_sampler_states(plan, main)
    _add_own_fields(plan, own, snapshots, again)
    return own


def _check_workers(plan: LoaderPlan, workers: int, snapshots: Mapping[str, Any]) -> None:
    if workers == plan.num_workers:
        return
    held = plan.iterable or is_stateful(plan.dataset)
    if held or any(place["dataset_state"] is not None for place in snapshots.values()):
        raise WorkersDiffer(
            f"_num_workers is {workers} in the state and {plan.num_workers} in this loader: each "
            "worker resumes its own part of the dataset, with its own state, so their number must be "
            "the same"
        )


def _own_sampler_states(plan: LoaderPlan, main: Mapping[str, Any]) -> tuple[Any, Any]:
    index, iterator = main["_index_sampler_state"], main["_sampler_iter_state"]
    if plan.batch_size is None:
        return (None if index is None else {"sampler_state": index}), iterator
    if iterator is None:
        return {"sampler_state": None}, None
    return {"sampler_state": iterator.get("sampler_state")}, (
        iterator if "sampler_iter_state" in iterator else None
    )


def _place(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "position": 0,
        "skip": 0,
        "dataset_state": snapshot["dataset_state"],
        "fetcher_state": snapshot["fetcher_state"]
        or {"dataset_iter_state": None, "fetcher_ended": False},
    }


def _add_own_fields(
    plan: LoaderPlan, own: dict[str, Any], snapshots: Mapping[str, Any], again: int
) -> None:
    """Add the fields that torchdata does not have to a state that it saved."""
    finished, iterable = own["_iterator_finished"], plan.iterable
    places = {name: _place(place) for name, place in snapshots.items()}
    has_states = any(
        place["dataset_state"] is not None
        or place["fetcher_state"]["dataset_iter_state"] is not None
        for place in places.values()
    )
    if not plan.num_workers and not iterable:
        places = {}  # `dataset_state` is the caller's own
    elif iterable and not plan.num_workers and has_states:
        own["dataset_state"] = None
    stays = bool(finished and (plan.persistent_workers or not plan.num_workers))
    own["_worker_snapshots"] = places if has_states and places and (stays or not finished) else None
    if iterable and not has_states:  # as torchdata, reads again all that was read
        again, own["_last_yielded_worker_id"] = again + own["_num_yielded"], -1
        own["_num_yielded"] = own["_sampler_iter_yielded"] = 0
    if finished and not plan.persistent_workers:
        own["_base_seed"] = None
    count, size = own["_sampler_iter_yielded"], plan.batch_size or 1
    own[OWN] = {
        "version": VERSION,
        **agreement(plan),
        "epoch": plan.epoch,
        "at": WITHIN,
        "counts": [count, own["_num_yielded"]],
        "samples": count * size,
        "steps": list(steps_of(plan.num_workers, again=bool(finished and plan.persistent_workers))),
        "start": None,
        "sampler_epoch": plan.samplers.announced_epoch,
        "generators": None,
        "check": None,
        "share": None,
        "since": 0,
        "whole": [],
        "behind": [*range(len(places))] if finished else [],
        "again": 0 if finished else again,
    }
