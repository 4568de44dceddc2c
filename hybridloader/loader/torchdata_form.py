"""State of a loader in torchdata's form: conversion of hybridloader's state dict, and back.

torchdata has two shapes, one without workers and one with workers. Values without a place in them are
plain values under one key, `OWN`, which torchdata ignores. A state without that key was saved by
torchdata. It has no state of torch's generators, so these stay as they are, as in torchdata.
"""

from __future__ import annotations

import base64
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hybridloader._support.states import copied, is_stateful
from hybridloader._support.user_objects import described, length_of
from hybridloader.errors import StateError
from hybridloader.loader.plan import LoaderPlan
from hybridloader.loader.samplers import steps_of
from hybridloader.loader.state import OWN, VERSION, WITHIN, agreement, given, snapshots_of

_SHARED = ("_sampler_iter_yielded", "_IterableDataset_len_called", "_shared_seed")
"""Keys of both of torchdata's shapes that hybridloader's dict has under the same names."""

_NO_FETCHER = {"dataset_iter_state": None, "fetcher_ended": False}


class WorkersDiffer(StateError, AssertionError):
    """The state is of another number of workers, each of which has a part. torchdata asserts this."""


def load(
    plan: LoaderPlan, state: Mapping[str, Any], load_own: Callable[[Mapping[str, Any]], None]
) -> None:
    """Convert `state` to hybridloader's form and pass it to `load_own`."""
    record = plan.record
    record.given = None
    if isinstance(state, Mapping) and not state:
        load_own(state)
        return
    try:
        load_own(read(plan, state))
        record.given = copied(dict(state))
    except WorkersDiffer as error:  # raised by `iter`
        load_own({})
        record.given = error


def state_of(plan: LoaderPlan, own: dict[str, Any]) -> dict[str, Any]:
    """Return `own`, the state of the loader, in torchdata's form."""
    record = plan.record
    if record.given is not None and not isinstance(record.given, WorkersDiffer):
        if record.loaded is not None:  # not used yet
            return dict(copied(record.given))
        record.given = None
    return written(plan, own)


# -- writing -----------------------------------------------------------------------------------------


def written(plan: LoaderPlan, own: dict[str, Any]) -> dict[str, Any]:
    """Return `own`, a state in hybridloader's form, in torchdata's form."""
    finished, yielded, progress = (
        own["_iterator_finished"],
        own["_num_yielded"],
        plan.record.progress,
    )
    main = {name: own[name] for name in _SHARED}
    main["_index_sampler_state"], main["_sampler_iter_state"] = _sampler_states(plan, own)
    more, places = dict(own[OWN]), own["_worker_snapshots"] or {}
    more["generators"] = {name: _text(state) for name, state in more["generators"].items()}
    more["places"] = [
        [place[name] for name in ("position", "skip", "again", "since")]
        for place in places.values()
    ]
    if more["since"]:  # torchdata's form has no field for items to be drawn again
        within = own["_index_sampler_state"] or {}
        more["base"] = [within.get("sampler_state"), own["_sampler_iter_state"]]
    if (
        finished and progress is not None
    ):  # torchdata writes states of the end even if no worker stays
        places = snapshots_of([end._replace(ended=True) for end in progress.ends()])
    workers = own["_num_workers"]
    readers = max(1, workers)
    snapshots = {name: _worker(plan, number, places.get(name)) for number, name in _names(readers)}
    if not workers:
        only = snapshots["worker_0"]
        state, fetcher = only["dataset_state"], only["fetcher_state"]
        itself = state is None and fetcher is not None and fetcher["dataset_iter_state"] is not None
        within = plan.iterable and not finished
        return {
            **main,
            "_num_yielded": yielded,
            "fetcher_state": fetcher,
            "dataset_state": state if within or itself else own["dataset_state"],
            "_iterator_finished": finished,
            OWN: {**more, "base_seed": own["_base_seed"]},  # only torchdata's workers are seeded
        }
    last = own["_last_yielded_worker_id"]
    last_shown = progress.last_worker if finished and progress is not None else last
    return {
        "_snapshot": {
            "_snapshot_step": yielded,
            "_last_yielded_worker_id": last_shown if last_shown >= 0 else readers - 1,
            "_main_snapshot": {
                "_num_workers": readers,
                **main,
                "_base_seed": own["_base_seed"],
            },
            "_worker_snapshots": snapshots,
        },
        "_steps_since_snapshot": 0,
        "_iterator_finished": finished,
        OWN: {**more, "last": last, "dataset_state": own["dataset_state"]},
    }


def _names(workers: int) -> list[tuple[int, str]]:
    return [(number, f"worker_{number}") for number in range(workers)]


def _worker(plan: LoaderPlan, number: int, place: Mapping[str, Any] | None) -> dict[str, Any]:
    fetcher = _NO_FETCHER if place is None else place["fetcher_state"]
    return {
        "worker_id": number,
        "dataset_state": None if place is None else place["dataset_state"],
        "fetcher_state": dict(fetcher) if plan.iterable else None,
    }


def _sampler_states(plan: LoaderPlan, own: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the states of the loader's sampler and of its iterator."""
    within, progress = own["_index_sampler_state"] or {}, plan.record.progress
    sampler, iterator = within.get("sampler_state"), own["_sampler_iter_state"]
    if own["_iterator_finished"] or own[OWN]["since"]:
        # torchdata writes those after the last returned item; hybridloader's dict has earlier ones, or
        # those of the next epoch.
        at = None if progress is None else progress.at
        checkpoint = None if at is None else at[2]
        sampler = None if checkpoint is None else given(checkpoint.state.sampler)
        iterator = None if checkpoint is None else given(checkpoint.state.iterator)
    elif sampler is None and not own["_sampler_iter_yielded"]:
        sampler = copied(own[OWN]["start"])
    if (
        plan.batch_size is None
    ):  # torchdata asks the iterator of the loader's own batch sampler only
        return sampler, iterator
    samples = own["_sampler_iter_yielded"] * plan.batch_size
    if not plan.iterable:
        samples = min(samples, length_of(plan.sampler) or samples)
    found = {"samples_yielded": samples, **(iterator or {})}
    if sampler is not None:
        found["sampler_state"] = sampler
    return None, found


def _text(state: Any) -> str:
    """Return the state of a generator, about 5 kB, as a text of that size."""
    return _packed(state.numpy().tobytes())


@functools.lru_cache(maxsize=8)  # the result is the same during an epoch, and takes 60 us
def _packed(state: bytes) -> str:
    return base64.b64encode(zlib.compress(state, 1)).decode()


# -- reading -----------------------------------------------------------------------------------------


def read(plan: LoaderPlan, state: Any) -> dict[str, Any]:
    """Return `state` in hybridloader's form. Raises `WorkersDiffer` for another number of workers."""
    if not isinstance(state, Mapping):
        raise StateError(f"the state of a loader is a dict, got {type(state).__name__}")
    if "_snapshot" not in state and "_num_workers" in state:
        return dict(state)  # a `DataLoader`'s
    try:
        return _read(plan, state)
    except StateError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"the state is not from a StatefulDataLoader of torchdata or hybridloader, or was truncated "
            f"({described(error)}); it has {sorted(map(str, state))}"
        ) from error


def _read(plan: LoaderPlan, state: Mapping[str, Any]) -> dict[str, Any]:
    finished, more = state["_iterator_finished"], state.get(OWN)
    own: dict[str, Any] = {"_iterator_finished": finished, "fetcher_state": None}
    if "_snapshot" in state:
        taken = state["_snapshot"]
        main, snapshots = taken["_main_snapshot"], dict(taken["_worker_snapshots"])
        workers, again = main["_num_workers"], state["_steps_since_snapshot"]
        own["_num_yielded"] = taken["_snapshot_step"]
        own["_last_yielded_worker_id"] = taken["_last_yielded_worker_id"]
        own["dataset_state"] = None if more is None else more["dataset_state"]
    else:
        main, workers, again = state, 0, 0
        own["_num_yielded"], own["_last_yielded_worker_id"] = state["_num_yielded"], -1
        main = {"_base_seed": (more or {}).get("base_seed", 0), **main}
        only = {name: state[name] for name in ("dataset_state", "fetcher_state")}
        snapshots = {"worker_0": {"worker_id": 0, **only}}
        own["dataset_state"] = state["dataset_state"]
    own.update({name: main[name] for name in _SHARED})
    own["_base_seed"], own["_num_workers"] = main["_base_seed"], workers
    _check_workers(plan, workers, snapshots)
    own["_index_sampler_state"], own["_sampler_iter_state"] = _own_sampler_states(plan, main)
    if more is not None:
        _read_ours(own, more, snapshots)
    else:
        _read_theirs(plan, own, snapshots, again)
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


def _read_ours(own: dict[str, Any], more: Mapping[str, Any], snapshots: Mapping[str, Any]) -> None:
    places = more["places"]
    own["_worker_snapshots"] = {
        name: _place(snapshots[name], *places[number]) for number, name in _names(len(places))
    } or None
    if more.get("base") is not None:
        sampler, own["_sampler_iter_state"] = more["base"]
        own["_index_sampler_state"] = {"sampler_state": sampler}
        if "last" not in more:  # the caller's own dataset has one state, in one of the two places
            ended = more["at"] != WITHIN
            (own["_worker_snapshots"]["worker_0"] if ended else own)["dataset_state"] = None
    own["_last_yielded_worker_id"] = more.get("last", own["_last_yielded_worker_id"])
    own["_base_seed"] = more.get("base_seed", own["_base_seed"])
    if not own["_sampler_iter_yielded"] and own["_index_sampler_state"] is not None:
        # Our key has the state of its beginning.
        own["_index_sampler_state"]["sampler_state"] = None
    own[OWN] = {
        **more,
        "generators": {name: _generator_state(text) for name, text in more["generators"].items()},
    }


def _generator_state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(text))), dtype=torch.uint8)


def _place(
    snapshot: Mapping[str, Any],
    position: int = 0,
    skip: int = 0,
    again: Sequence[Any] = (),
    since: int = 0,
) -> dict[str, Any]:
    return {
        "position": position,
        "skip": skip,
        "again": list(again),
        "since": since,
        "dataset_state": snapshot["dataset_state"],
        "fetcher_state": snapshot["fetcher_state"] or dict(_NO_FETCHER),
    }


def _read_theirs(
    plan: LoaderPlan, own: dict[str, Any], snapshots: Mapping[str, Any], again: int
) -> None:
    """Add the fields that only hybridloader's form has, for a state that torchdata saved."""
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
        "apart": [],
        "whole": [],
        "first": [],
        "behind": [number for number, _ in _names(len(places))] if finished else [],
        "again": 0 if finished else again,
    }
