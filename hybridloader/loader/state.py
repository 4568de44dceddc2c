"""The state of a loader as a dict: how it is written, and how it is read and checked.

The keys are torchdata's where it has such, because frameworks edit these; what else is needed is under
one key of ours. Nothing is moved here: no sampler, generator or worker is touched by either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from hybridloader._support.errors import StateError
from hybridloader._support.state_copies import (
    Frozen,
    Given,
    Kept,
    check_takes,
    copied,
    is_stateful,
    made,
    taken,
)
from hybridloader._support.state_schema import ANY, COUNT, DICT, LIST, TRUTH, Schema, among, list_of
from hybridloader.engine.dataset_state import ShardStart
from hybridloader.loader.progress import UNKNOWN, Progress
from hybridloader.loader.sampler_replay import SamplerReplay, check_of
from hybridloader.loader.samplers import Snapshot

if TYPE_CHECKING:
    from hybridloader.loader.plan import LoaderPlan

VERSION = 1
"""Of what is under `OWN`; it changes with the meaning of a field."""

OWN = "_hybridloader"


@dataclass
class Resume:
    """What a pass that goes on from a state begins with.

    Attributes
    ----------
    fresh
        Whether it is a pass from its beginning, because that before it was over, or none had begun.
    empty
        Whether nothing is left of it.
    count
        Items of the sampler that are behind.
    snapshot
        The sampler's state there, or some items before, if it is known.
    since
        Number of items from the snapshot to that place.
    apart, whole
        What comes again before the sampler goes on: indices of waiting samples, and items.
    starts
        Of workers that read an iterable dataset, or have a state of their own.
    first
        Workers that are asked first, in this order.
    last
        The worker whose turn was last.
    discard
        Number of batches to be made and dropped, if there is no other way to get to the place.
        `count` and `yielded` do not include them.
    as_they_stand
        Whether the state has no generators: then they are drawn from as they are.
    """

    making: SamplerReplay
    epoch: int
    fresh: bool = False
    empty: bool = False
    over: bool = False
    count: int = 0
    yielded: int = 0
    check: int | None = None
    snapshot: Snapshot | None = None
    since: int = 0
    base_seed: int | None = None
    shared_seed: int | None = None
    dataset: Any = None
    apart: list[Any] = field(default_factory=list)
    whole: list[Any] = field(default_factory=list)
    starts: tuple[ShardStart, ...] = ()
    first: tuple[int, ...] = ()
    last: int = -1
    discard: int = 0
    as_they_stand: bool = False

    @property
    def next_epoch(self) -> int:
        """That of the pass which goes on from it; of what is over, `epoch` is the next."""
        return max(0, self.epoch - self.empty) + self.over


def agreement(plan: LoaderPlan) -> dict[str, Any]:
    """What the loader that loads a state must have in common with the one that it was taken of."""
    own = {
        "kind": "iterable" if plan.iterable else "map",
        "length": None if plan.iterable else length_of(plan.dataset),
        "batch_size": plan.batch_size,
        "drop_last": plan.drop_last,
        "samplers": [] if plan.iterable else plan.samplers.names,
    }
    if plan.iterable:
        own["shard_remainders"] = plan.options.shard_remainders
    return own


def length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


START, WITHIN, END = "start", "within", "end"
"""Where a state was taken: before any pass, in one, or behind its end."""


def written(plan: LoaderPlan, progress: Progress, where: str) -> dict[str, Any]:
    """The state of a pass; of none, or behind the end, that from which the next one is made.

    Raises
    ------
    StateError
        The dataset's part can't be had.
    """
    over, iterable, making = where != WITHIN, progress.iterable, progress.making
    dataset = None
    if (over or not iterable) and is_stateful(plan.dataset):
        dataset = taken(plan.dataset, "the dataset", progress.own.copy)
    apart, whole = ([], []) if iterable or over else progress.indices_left
    at = None if over else progress.at
    base = None if at is None else progress.base(partial(length_of, plan.samplers.outer))
    snapshot = None if base is None else base.snapshot
    count = progress.behind
    size = plan.batch_size or 1
    starts = progress.starts()
    told = (iterable and not over) or any(start.stateful for start in starts)
    # Nothing in the dict may be ours to go on with; a copy of all, tensors too, would take 100 us more.
    own_state = None if snapshot is None else given(snapshot.sampler)
    index_state = {"samples_yielded": count * size, "sampler_state": own_state}
    if plan.batch_size is None:  # accelerate multiplies it with batch_size if it is there
        del index_state["samples_yielded"]
    return {
        "_sampler_iter_yielded": count,
        "_num_yielded": progress.yielded,
        "_index_sampler_state": None if iterable else index_state,
        "_sampler_iter_state": None if snapshot is None else given(snapshot.iterator),
        "_IterableDataset_len_called": plan.length_called,
        "_shared_seed": progress.shared_seed,
        "_base_seed": progress.base_seed,
        "_num_workers": plan.num_workers,
        "_last_yielded_worker_id": progress.last_worker,
        "dataset_state": dataset,
        "fetcher_state": None,
        "_worker_snapshots": snapshots_of(starts) if told else None,
        "_iterator_finished": where == END,
        OWN: {
            "version": VERSION,
            **agreement(plan),
            "epoch": progress.epoch,
            "at": where,
            "counts": [count, progress.yielded],
            "samples": count * size,
            "steps": list(making.steps),
            "start": given(making.start),
            "sampler_epoch": making.epoch,
            "generators": {name: each.clone() for name, each in making.generators.items()},
            "check": None if at is None or at[1] is UNKNOWN else check_of(at[1]),
            "share": None if iterable else plan.samplers.share,
            "since": 0 if base is None else count - base.number,
            "apart": copied(apart) if apart else [],
            "whole": copied(whole) if whole else [],
            "first": [] if over else _first(progress),
            "behind": [number for number, start in enumerate(progress.places) if start.behind],
        },
    }


def _first(progress: Progress) -> list[int]:
    """Workers whose last samples wait to be joined, in that order."""
    waiting = [w for w, _ in progress.waiting.samples if w is not None and w in progress.remainders]
    return list(dict.fromkeys([*waiting, *progress.first]))


def snapshots_of(starts: list[ShardStart]) -> dict[str, Any]:
    """Where workers go on, by their names."""
    return {
        f"worker_{number}": {
            "worker_id": number,
            "position": start.position,
            "skip": start.skip,
            "again": copied(list(start.again)) if start.again else [],
            "since": start.since,
            "dataset_state": given(start.dataset),
            "fetcher_state": {
                "dataset_iter_state": given(start.iterator),
                "fetcher_ended": start.ended,
            },
        }
        for number, start in enumerate(starts)
    }


def given(state: Given | None) -> Any:
    """Return a copy of a kept state; None if there is none."""
    return None if state is None else state.given()


# -- reading -----------------------------------------------------------------------------------------


_FIELDS = Schema(
    "loader",
    (COUNT, "_sampler_iter_yielded _num_yielded"),
    (TRUTH, "_iterator_finished"),
    (ANY, "_index_sampler_state _sampler_iter_state dataset_state _worker_snapshots"),
    (ANY, "_shared_seed _base_seed _num_workers _last_yielded_worker_id"),
)

_OWN_FIELDS = Schema(
    "loader",
    (COUNT, "epoch samples since? again?"),
    (among(START, WITHIN, END), "at"),
    (list_of(among("iter", "seed"), "a list of 'iter' and 'seed'"), "steps"),
    (LIST, "counts apart whole first behind?"),
    (ANY, "start sampler_epoch generators check"),
    version=VERSION,
)

_PLACE = Schema(
    "worker",
    (COUNT, "position skip since?"),
    (DICT, "fetcher_state"),
    (LIST, "again?"),
    (ANY, "dataset_state"),
)

_COUNTED = Schema("sampler", (COUNT, "samples_yielded"))


def read(plan: LoaderPlan, state: Any) -> Resume:
    """What `state` says, checked as far as that can be done without moving anything.

    Raises
    ------
    StateError
        It is not of a loader like this one; the message names the field.
    """
    own: Any = state.get(OWN) if isinstance(state, Mapping) else None
    if isinstance(state, Mapping) and not isinstance(own, Mapping):
        more = ""
        if "_snapshot" in state or "_num_yielded" in state:
            more = ", as torchdata's loaders do; hybridloader.StatefulDataLoader reads these"
        raise StateError(
            f"this is not the state of a hybridloader.DataLoader: it has no {OWN!r}, but "
            f"{sorted(map(str, state))}{more}"
        )
    _FIELDS.check(state)
    _OWN_FIELDS.check(own, agreement(plan))
    try:
        return _read(plan, state, own)
    except StateError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"the state is damaged ({type(error).__name__}: {error}); load another one"
        ) from error


def _read(plan: LoaderPlan, state: Mapping[str, Any], own: Mapping[str, Any]) -> Resume:
    start = None if own["start"] is None else Kept(own["start"])
    generators = own["generators"]
    making = SamplerReplay(tuple(own["steps"]), dict(generators or {}), start, own["sampler_epoch"])
    within, finished = own["at"] == WITHIN, state["_iterator_finished"]
    seed = state["_base_seed"] if within or "seed" not in making.steps else None
    resume = Resume(making, own["epoch"], base_seed=seed, shared_seed=state["_shared_seed"])
    resume.dataset, resume.as_they_stand = state["dataset_state"], generators is None
    if not within:
        resume.empty = own["at"] == END and not finished
        resume.fresh, resume.shared_seed = not resume.empty, None
        if resume.fresh and state["_num_workers"] == plan.num_workers:
            _read_workers(plan, state, own, resume, edited=False)
        return resume
    count, edited = _count_of(plan, state, own)
    resume.over, resume.count = finished, count
    resume.yielded = count if edited else state["_num_yielded"]
    resume.discard = own.get("again", 0)
    if not edited:
        resume.check = own["check"] if _is_of_this_rank(plan, own) else None
        resume.apart, resume.whole = list(own["apart"]), list(own["whole"])
        resume.snapshot = _snapshot(state)
        resume.since = own.get("since", 0)
    _read_workers(plan, state, own, resume, edited)
    replayed = own["kind"] == "map" and resume.snapshot is None
    length = length_of(plan.samplers.outer) if replayed else None
    if length is not None and count > length:
        raise StateError(
            f"_sampler_iter_yielded is {count} in the state, and {plan.index_sampler_name} has only "
            f"{length} items: it has shrunk, or the state is of another one"
        )
    return resume


def _is_of_this_rank(plan: LoaderPlan, own: Mapping[str, Any]) -> bool:
    """True if the rank that took the state drew what this one draws; all have come equally far."""
    share = own.get("share")
    here = None if own["kind"] == "iterable" else plan.samplers.share
    if share is None or here is None or share == here:
        return True
    if share[1] != here[1]:
        raise StateError(
            f"the state is of rank {share[0]} of {share[1]}, and this is rank {here[0]} of {here[1]}: "
            "their samplers draw other parts; take hybridloader's DistributedShuffleSampler to change "
            "the number of ranks"
        )
    return False


def _snapshot(state: Mapping[str, Any]) -> Snapshot | None:
    within = state["_index_sampler_state"]
    sampler = within.get("sampler_state") if isinstance(within, Mapping) else None
    states = [None if s is None else Kept(s) for s in (sampler, state["_sampler_iter_state"])]
    return Snapshot(*states) if any(states) else None


def _count_of(
    plan: LoaderPlan, state: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[int, bool]:
    """Items of the sampler that are behind, and whether somebody has edited that."""
    count, yielded = state["_sampler_iter_yielded"], state["_num_yielded"]
    within = state["_index_sampler_state"]
    samples = own["samples"]
    if isinstance(within, Mapping) and "samples_yielded" in within:
        _COUNTED.check(within)
        samples = within["samples_yielded"]
    saved, saved_yielded = own["counts"]
    edits = (  # what is there, what was there, and the count that it means
        (count, saved, count),
        (yielded, saved_yielded, saved + yielded - saved_yielded),
        (samples, own["samples"], samples // (plan.batch_size or 1)),
    )
    said = {meant for now, then, meant in edits if now != then}
    if len(said) > 1:
        raise StateError(
            f"_sampler_iter_yielded is {count}, _num_yielded {yielded} and samples_yielded {samples} "
            f"in the state, which was taken with {saved}, {saved_yielded} and {own['samples']}: these "
            "edits contradict each other"
        )
    return (said.pop(), True) if said else (count, False)


def _read_workers(
    plan: LoaderPlan, state: Mapping[str, Any], own: Mapping[str, Any], resume: Resume, edited: bool
) -> None:
    places, workers = state["_worker_snapshots"], plan.readers
    resume.last = state["_last_yielded_worker_id"]
    if places is None:
        return
    if state["_num_workers"] != plan.num_workers:
        raise StateError(
            f"_num_workers is {state['_num_workers']} in the state and {plan.num_workers} in this "
            "loader: each worker goes on in the part of the dataset that it reads, so their number must "
            "be the same"
        )
    resume.first = tuple(own["first"])
    if edited and own["kind"] == "iterable":
        resume.first, resume.last = (), -1
        resume.discard, resume.count, resume.yielded = resume.count, 0, 0
        return
    starts, behind = [], own.get("behind", ())
    for number in range(workers):
        place = places.get(f"worker_{number}")
        if not isinstance(place, Mapping):
            raise StateError(f"the state lacks worker_{number}: was it cut off?")
        _PLACE.check(place)
        within = place["fetcher_state"]
        starts.append(
            ShardStart(
                place["position"],
                place["skip"],
                _frozen(place["dataset_state"]),
                _frozen(within["dataset_iter_state"]),
                within["fetcher_ended"],
                tuple(place.get("again", ())),
                number in behind,
                place.get("since", 0),
            )
        )
    resume.starts = tuple(starts)
    if any(start.dataset is not None for start in starts):
        check_takes(plan.dataset, "the dataset")


def _frozen(state: Any) -> Any:
    return None if state is None else Frozen(made(Frozen.keep, state, "the dataset"))
