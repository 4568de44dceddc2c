"""State of a loader as a dict: written, read and checked.

The keys are torchdata's if it has them, because frameworks edit these. The other fields are under one
key, `OWN`. Writing and reading change no sampler, generator or worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hybridloader._support.states import (
    ANY,
    COUNT,
    DICT,
    LIST,
    TRUTH,
    Frozen,
    Given,
    Kept,
    Schema,
    among,
    check_takes,
    copied,
    is_stateful,
    list_of,
    made,
    taken,
)
from hybridloader._support.user_objects import described, length_of
from hybridloader.engine.dataset_state import ShardStart
from hybridloader.errors import StateError
from hybridloader.fetching.shards import ShardDivision, merged
from hybridloader.loader.plan import LoaderPlan
from hybridloader.loader.progress import UNKNOWN, Progress
from hybridloader.loader.samplers import SamplerReplay, SamplerState, check_of, steps_of

VERSION = 1
"""Version of the fields under `OWN`; it changes if the meaning of a field changes."""

OWN = "_hybridloader"


@dataclass
class ResumePoint:
    """Position at which an epoch resumes, read from a state."""

    replay: SamplerReplay
    """Description of how the sampler's iterator was made."""
    epoch: int
    fresh: bool = False
    """True if the epoch begins at its beginning: the previous one was over, or none had begun."""
    empty: bool = False
    """True if nothing is left of the epoch."""
    over: bool = False
    """True if an edit of the state declares the epoch over, so that the next one begins."""
    count: int = 0
    """Number of the sampler's items that were returned, without `discard`."""
    yielded: int = 0
    """Number of batches returned to the caller, without `discard`."""
    check: int | None = None
    """Checksum of the last of these items, if known."""
    sampler: SamplerState | None = None
    """State of the sampler at this position, or `since` items earlier, if known."""
    since: int = 0
    base_seed: int | None = None
    shared_seed: int | None = None
    dataset: Any = None
    """State of the caller's dataset."""
    apart: list[Any] = field(default_factory=list)
    """Indices of samples that are fetched again before the sampler continues."""
    whole: list[Any] = field(default_factory=list)
    """Items of the sampler that are fetched again before it continues."""
    starts: tuple[ShardStart, ...] = ()
    """Starts of workers that read an iterable dataset, or have the dataset's state."""
    first: tuple[int, ...] = ()
    """Workers that are asked first, in this order."""
    last: int = -1
    """Worker whose turn was last."""
    discard: int = 0
    """Number of batches to make and drop, if there is no other way to the position."""
    division: ShardDivision | None = None
    """Division of named shards among the workers; None for that of a whole epoch, or without shards."""
    as_they_stand: bool = False
    """True if the state has no generators, so that the loader's generators stay as they are."""

    @property
    def next_epoch(self) -> int:
        """Number of the resumed epoch; if that is over, of the next one."""
        return max(0, self.epoch - self.empty) + self.over


def agreement(plan: LoaderPlan) -> dict[str, Any]:
    """Return the fields that must be equal in the loaders that save and load a state."""
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


START, WITHIN, END = "start", "within", "end"
"""Positions at which a state is taken: before the first epoch, within an epoch, or after its end."""


def written(plan: LoaderPlan, progress: Progress, where: str) -> dict[str, Any]:
    """Return the state of an epoch; before the first epoch and after an end, that of the next one."""
    over, iterable, replay = where != WITHIN, progress.iterable, progress.replay
    dataset = None
    if (over or not iterable) and is_stateful(plan.dataset):
        dataset = taken(plan.dataset, "the dataset", progress.own_dataset.copy)
    apart, whole = ([], []) if iterable or over else progress.indices_left
    at = None if over else progress.at
    checkpoint = None
    if at is not None:
        checkpoint = progress.checkpoint(partial(length_of, plan.samplers.outer))
    sampler = None if checkpoint is None else checkpoint.state
    count = progress.count
    size = plan.batch_size or 1
    stay = bool(plan.num_workers and plan.persistent_workers)
    starts = progress.starts()
    with_starts = (iterable and not over) or any(start.stateful for start in starts)
    # Nothing in the dict is shared with this epoch; a copy of it, with tensors, would take 100 us more.
    sampler_state = None if sampler is None else given(sampler.sampler)
    index_state = {"samples_yielded": count * size, "sampler_state": sampler_state}
    if plan.batch_size is None:  # accelerate multiplies it with batch_size if it is there
        del index_state["samples_yielded"]
    return {
        "_sampler_iter_yielded": count,
        "_num_yielded": progress.yielded,
        "_index_sampler_state": None if iterable else index_state,
        "_sampler_iter_state": None if sampler is None else given(sampler.iterator),
        "_IterableDataset_len_called": plan.length_called,
        "_shared_seed": progress.shared_seed,
        "_base_seed": progress.base_seed,
        "_num_workers": progress.workers,
        "_last_yielded_worker_id": progress.last_worker,
        "dataset_state": dataset,
        "fetcher_state": None,
        "_worker_snapshots": snapshots_of(starts) if with_starts else None,
        "_iterator_finished": where == END,
        OWN: {
            "version": VERSION,
            **agreement(plan),
            "epoch": progress.epoch,
            "at": where,
            "counts": [count, progress.yielded],
            "samples": count * size,
            "steps": list(replay.steps),
            "later": list(replay.later or steps_of(plan.num_workers, again=stay)),
            "start": given(replay.start),
            "sampler_epoch": replay.epoch,
            "generators": {name: each.clone() for name, each in replay.generators.items()},
            "check": None if at is None or at[1] is UNKNOWN else check_of(at[1]),
            "share": None if iterable else plan.samplers.share,
            "since": 0 if checkpoint is None else count - checkpoint.number,
            "apart": copied(apart) if apart else [],
            "whole": copied(whole) if whole else [],
            "first": [] if over else _first(progress),
            "behind": [number for number, start in enumerate(progress.places) if start.next_epoch],
            "shards": _shards(progress, where, starts),
        },
    }


def _shards(progress: Progress, where: str, starts: list[ShardStart]) -> dict[str, Any] | None:
    if progress.division is None:
        return None
    return progress.division.state_after(None if where == END else starts)


def _first(progress: Progress) -> list[int]:
    """Return the workers whose last samples wait to be joined, in order."""
    waiting = [w for w, _ in progress.waiting.samples if w is not None and w in progress.remainders]
    return list(dict.fromkeys([*waiting, *progress.first]))


def snapshots_of(starts: list[ShardStart]) -> dict[str, Any]:
    """Return the positions at which workers resume, by the workers' names."""
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
    (list_of(among("iter", "seed"), "a list of 'iter' and 'seed'"), "steps later?"),
    (LIST, "counts apart whole first behind?"),
    (ANY, "start sampler_epoch generators check shards?"),
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


def read(plan: LoaderPlan, state: Any) -> ResumePoint:
    """Return the position in `state`, with all checks that have no side effect."""
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
        raise StateError(f"the state is damaged ({described(error)}); load another one") from error


def _read(plan: LoaderPlan, state: Mapping[str, Any], own: Mapping[str, Any]) -> ResumePoint:
    start = None if own["start"] is None else Kept(own["start"])
    generators = own["generators"]
    steps, later = tuple(own["steps"]), tuple(own.get("later", ())) or None
    replay = SamplerReplay(steps, dict(generators or {}), start, own["sampler_epoch"], later)
    within, finished = own["at"] == WITHIN, state["_iterator_finished"]
    seed = state["_base_seed"] if within or "seed" not in replay.steps else None
    resume = ResumePoint(replay, own["epoch"], base_seed=seed, shared_seed=state["_shared_seed"])
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
        resume.sampler = _sampler_state(state)
        resume.since = own.get("since", 0)
    _read_workers(plan, state, own, resume, edited)
    replayed = own["kind"] == "map" and resume.sampler is None
    length = length_of(plan.samplers.outer) if replayed else None
    if length is not None and count > length:
        name = type(plan.samplers.outer).__name__
        raise StateError(
            f"_sampler_iter_yielded is {count} in the state, and {name} has only {length} items: it has "
            "become shorter, or the state is of another sampler"
        )
    return resume


def _is_of_this_rank(plan: LoaderPlan, own: Mapping[str, Any]) -> bool:
    """Return True if this rank draws as the one that saved; all ranks have come equally far."""
    share = own.get("share")
    here = None if own["kind"] == "iterable" else plan.samplers.share
    if share is None or here is None or share == here:
        return True
    if share[1] != here[1]:
        raise StateError(
            f"the state is of rank {share[0]} of {share[1]}, and this is rank {here[0]} of {here[1]}: "
            "their samplers draw other parts; use hybridloader's DistributedShuffleSampler to change "
            "the number of ranks"
        )
    return False


def _sampler_state(state: Mapping[str, Any]) -> SamplerState | None:
    within = state["_index_sampler_state"]
    sampler = within.get("sampler_state") if isinstance(within, Mapping) else None
    states = [None if s is None else Kept(s) for s in (sampler, state["_sampler_iter_state"])]
    return SamplerState(*states) if any(states) else None


def _count_of(
    plan: LoaderPlan, state: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[int, bool]:
    """Return the number of returned items of the sampler, and True if that number was edited."""
    count, yielded = state["_sampler_iter_yielded"], state["_num_yielded"]
    within = state["_index_sampler_state"]
    samples = own["samples"]
    if isinstance(within, Mapping) and "samples_yielded" in within:
        _COUNTED.check(within)
        samples = within["samples_yielded"]
    saved, saved_yielded = own["counts"]
    edits = (  # (value, saved value, count that the value means)
        (count, saved, count),
        (yielded, saved_yielded, saved + yielded - saved_yielded),
        (samples, own["samples"], samples // (plan.batch_size or 1)),
    )
    edited = {meant for now, then, meant in edits if now != then}
    if len(edited) > 1:
        raise StateError(
            f"_sampler_iter_yielded is {count}, _num_yielded {yielded} and samples_yielded {samples} "
            f"in the state, which was taken with {saved}, {saved_yielded} and {own['samples']}: these "
            "edits contradict each other"
        )
    return (edited.pop(), True) if edited else (count, False)


def _read_workers(
    plan: LoaderPlan,
    state: Mapping[str, Any],
    own: Mapping[str, Any],
    resume: ResumePoint,
    edited: bool,
) -> None:
    places, workers = state["_worker_snapshots"], plan.readers
    resume.last = state["_last_yielded_worker_id"]
    if places is None:
        return
    if own["at"] == WITHIN and _divide(plan, state, own, resume):
        if edited:
            raise StateError(
                "the counts of the state were edited, and its shards are divided among other workers or "
                "ranks: no batches can be counted from the beginning of the epoch; load the state as it "
                "was saved"
            )
        return
    if state["_num_workers"] != plan.num_workers:
        why = "each worker resumes its own part of the dataset, so their number must be the same"
        if own["kind"] == "iterable":
            why += (
                f". {type(plan.dataset).__name__} does not name its shards; with shard_names and "
                "read_shard() it resumes on any number of workers (docs/resuming.md)"
            )
        raise StateError(
            f"_num_workers is {state['_num_workers']} in the state and {plan.num_workers} in this "
            f"loader: {why}"
        )
    resume.first = tuple(own["first"])
    if edited and own["kind"] == "iterable":
        if resume.division is not None and not resume.division.whole:
            raise StateError(
                "the counts of the state were edited, and this epoch was resumed on other workers or "
                "ranks before: no batches can be counted from its beginning; load the state as it was "
                "saved"
            )
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


def _divide(
    plan: LoaderPlan, state: Mapping[str, Any], own: Mapping[str, Any], resume: ResumePoint
) -> bool:
    """Note the division of named shards; return True if it differs from that of the saved loader."""
    saved = own.get("shards")
    whole = ShardDivision.of(plan.dataset, plan.readers) if plan.iterable else None
    if whole is None:
        if saved is not None:
            raise StateError(
                "the state is of a dataset that names its shards, and "
                f"{type(plan.dataset).__name__} has no shard_names and read_shard()"
            )
        return False
    if saved is None:
        return False
    same_workers = state["_num_workers"] == plan.num_workers
    resume.division = whole.resumed(saved, same_workers=same_workers)
    if same_workers and whole.agrees(saved):
        return False
    resume.starts, resume.last = resume.division.starts(saved), -1
    return True


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks into one, for loaders whose datasets name their shards."""
    owns = []
    for number, state in enumerate(states):
        own: Any = state.get(OWN) if isinstance(state, Mapping) else None
        if not isinstance(own, Mapping):
            raise StateError(f"state {number} is not from a hybridloader.DataLoader")
        _FIELDS.check(state)
        _OWN_FIELDS.check(own)
        if own.get("shards") is None:
            raise StateError(
                f"state {number} has no shards: only states of iterable datasets with shard_names and "
                "read_shard() are merged. A map-style dataset with hybridloader's "
                "DistributedShuffleSampler resumes on other ranks without"
            )
        owns.append(own)
    if not owns:
        raise StateError("there is no state to merge; pass those of all ranks")
    shards = merged([own["shards"] for own in owns])
    ended = [own["at"] == END for own in owns]
    epochs = {own["epoch"] - over for own, over in zip(owns, ended, strict=True)}
    if len(epochs) > 1:
        raise StateError(f"the states are of the epochs {sorted(epochs)}; merge those of one epoch")
    if all(ended):
        return dict(copied(dict(states[0])))
    found = dict(copied(dict(states[ended.index(False)])))
    found.update(_worker_snapshots={}, _last_yielded_worker_id=-1, _iterator_finished=False)
    found[OWN].update(at=WITHIN, first=[], behind=[], shards=shards)
    return found


def _frozen(state: Any) -> Any:
    return None if state is None else Frozen(made(Frozen.keep, state, "the dataset"))
