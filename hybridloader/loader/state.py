"""State of a loader as a dict: written, read and checked; and the start of an epoch from it.

The keys are torchdata's if it has them, because frameworks edit these. The other fields are under one
key, `OWN`. Writing and reading change no sampler, generator or worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any

import torch

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
    load_into,
    made,
    owner_of,
    place_dropped,
    taken,
)
from hybridloader._support.system import cached_property
from hybridloader._support.text import INFO, log, warn, warn_once
from hybridloader._support.torch_env import is_datapipe, seed_datapipe
from hybridloader._support.user_objects import described, has, length_of
from hybridloader.engine.dataset_state import ShardStart, undo_load
from hybridloader.engine.scheduler import Dispatch, Scheduler, round_robin
from hybridloader.errors import StateError
from hybridloader.fetching.shards import ShardDivision, merged
from hybridloader.loader.plan import LoaderPlan
from hybridloader.loader.progress import UNKNOWN, Progress, SamplerCheckpoint
from hybridloader.loader.samplers import (
    DEFAULT,
    IndicesAndSeed,
    SamplerReplay,
    SamplerState,
    check_of,
    load_sampler,
    steps_of,
)

VERSION = 2  # version of the fields under `OWN`; it changes if the meaning of a field changes

OWN = "_hybridloader"


class Begins(Enum):
    """How an epoch begins."""

    AS_TORCH = 0  # at its beginning, with torch's draws, which are recorded and not changed
    FRESH = 1  # at its beginning, by the steps of a saved loader
    HERE = 2  # after the items that were returned
    EMPTY = 3  # at its end: nothing is left of it
    OVER = 4  # an edit of the state declares the epoch over: the next one begins


@dataclass
class ResumePoint:
    """Position at which an epoch begins, read from a state if one was loaded."""

    replay: SamplerReplay  # description of how the sampler's iterator was made
    epoch: int
    begins: Begins = Begins.HERE
    count: int = 0  # number of the sampler's items that were returned, without `discard`
    yielded: int = 0  # number of batches returned to the caller, without `discard`
    check: int | None = None  # checksum of the last of these items, if known
    sampler: SamplerState | None = None
    """State of the sampler at this position, or `since` items earlier, if known."""
    since: int = 0
    base_seed: int | None = None
    shared_seed: int | None = None
    dataset: Any = None  # state of the caller's dataset
    whole: list[Any] = field(default_factory=list)
    """Items of the sampler that are fetched again before it continues."""
    starts: tuple[ShardStart, ...] = ()
    """Starts of workers that read an iterable dataset, or have the dataset's state."""
    last: int = -1  # worker whose turn was last
    discard: int = 0  # number of batches to make and drop, if there is no other way to the position
    division: ShardDivision | None = None
    """Division of named shards among the workers; None for that of a whole epoch, or without shards."""
    as_they_stand: bool = False
    """True if the state has no generators, so that the loader's generators stay as they are."""

    @property
    def next_epoch(self) -> int:
        """Number of the resumed epoch; if that is over, of the next one."""
        return max(0, self.epoch - (self.begins is Begins.EMPTY)) + (self.begins is Begins.OVER)


def agreement(plan: LoaderPlan) -> dict[str, Any]:
    """Return the fields that must be equal in the loaders that save and load a state."""
    return {
        "kind": "iterable" if plan.iterable else "map",
        "length": None if plan.iterable else length_of(plan.dataset),
        "batch_size": plan.batch_size,
        "drop_last": plan.drop_last,
        "samplers": [] if plan.iterable else plan.samplers.names,
    }


START, WITHIN, END = "start", "within", "end"
"""Positions at which a state is taken: before the first epoch, within an epoch, or after its end."""


def written(plan: LoaderPlan, progress: Progress, where: str) -> dict[str, Any]:
    """Return the state of an epoch; before the first epoch and after an end, that of the next one."""
    over, iterable, replay = where != WITHIN, progress.iterable, progress.replay
    dataset = None
    if (over or not iterable) and is_stateful(plan.dataset):
        dataset = taken(plan.dataset, "the dataset", copied)
    whole = [] if iterable or over else progress.left
    at = None if over else progress.at
    checkpoint = None
    if at is not None:
        checkpoint = progress.checkpoint(partial(length_of, plan.samplers.outer))
    sampler = None if checkpoint is None else checkpoint.state
    count = progress.count
    size = plan.batch_size or 1
    stay = bool(plan.num_workers and plan.persistent_workers)
    starts, division = progress.starts(), progress.division
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
            "whole": copied(whole) if whole else [],
            "behind": [number for number, start in enumerate(progress.places) if start.next_epoch],
            "shards": division and division.state_after(None if where == END else starts),
        },
    }


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
    (LIST, "counts whole behind?"),
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
    if isinstance(state, Mapping) and (not isinstance(own, Mapping) or "state" in own):
        raise StateError(
            f"this is not the state of a hybridloader.DataLoader: {owner_of(state)}. Load it with the "
            "class that saved it; hybridloader.StatefulDataLoader also loads those of torchdata's"
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
        resume.begins = Begins.EMPTY if own["at"] == END and not finished else Begins.FRESH
        resume.shared_seed = None
        if resume.begins is Begins.FRESH and state["_num_workers"] == plan.num_workers:
            _read_workers(plan, state, own, resume, edited=False)
        return resume
    count, edited = _count_of(plan, state, own)
    resume.begins, resume.count = Begins.OVER if finished else Begins.HERE, count
    resume.yielded = count if edited else state["_num_yielded"]
    resume.discard = own.get("again", 0)
    if not edited:
        resume.check = own["check"] if _is_of_this_rank(plan, own) else None
        resume.whole = list(own["whole"])
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
    if edited and own["kind"] == "iterable":
        if resume.division is not None and not resume.division.whole:
            raise StateError(
                "the counts of the state were edited, and this epoch was resumed on other workers or "
                "ranks before: no batches can be counted from its beginning; load the state as it was "
                "saved"
            )
        resume.last, resume.discard = -1, resume.count
        resume.count = resume.yielded = 0
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
    # Samples are numbered on, so that no seed of a sample is used twice.
    resume.starts = (ShardStart(saved["read"], saved["read"]),) * plan.readers
    resume.last = -1
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
    found[OWN].update(at=WITHIN, behind=[], shards=shards)
    return found


def _frozen(state: Any) -> Any:
    return None if state is None else Frozen(made(Frozen.keep, state, "the dataset"))


# -- Start of an epoch of a loader: at its beginning, or at the position of a state.
#
# A loaded state is applied in this order: the generators, the sampler, the dataset; then workers start.


class ResumedDispatch:
    """Rule of dispatch, with an exception for the first task of a resumed epoch."""

    def __init__(self, rule: Dispatch) -> None:
        self._rule = rule
        self.last: int | None = None
        """Worker whose turn was before that task; None: the rule alone decides."""

    def __call__(self, scheduler: Scheduler) -> int | None:
        if self.last is not None and scheduler.next_in == scheduler.first:
            return round_robin(scheduler, self.last)
        return self._rule(scheduler)


class PassStart:
    """Start of one epoch; `again` if the workers of the previous epoch are kept."""

    def __init__(self, plan: LoaderPlan, *, again: bool) -> None:
        self._plan, self._again = plan, again
        samplers, state, before = plan.samplers, plan.record.loaded, plan.record.progress
        used = before is not None and (before.finished or before.yielded > before.resumed_at)
        if used and plan.iterable:  # an epoch has used the load of a state
            undo_load(plan.dataset)
        self.loads = state is not None  # True if a state was loaded
        now, as_torch = _replay_now(plan, again=again)
        if state is not None:
            resume = read(plan, state)
        elif before is None or as_torch:
            resume = ResumePoint(now, plan.epoch, Begins.AS_TORCH)
        else:
            resume = ResumePoint(now, plan.epoch, Begins.FRESH)
            if plan.seeded_by_sample and "seed" not in now.steps:
                resume.base_seed = before.base_seed
        if resume.begins is Begins.FRESH:
            resume.replay = resume.replay.at_later_epoch(samplers)
        if resume.as_they_stand:
            resume.replay = SamplerReplay.of(samplers, resume.replay.steps)
        self.resume = resume  # position at which the epoch begins
        self.replay = now if resume.begins is Begins.OVER else resume.replay
        self.epoch = resume.next_epoch  # number of the epoch
        self._eager = False
        self._default: Any = None  # state of torch's default generator before the epoch

    @property
    def seed_stays(self) -> bool:
        """True if later epochs use the same seed for the workers."""
        later = self.resume.replay.later
        if later is not None:
            return "seed" not in later
        return bool(self._plan.persistent_workers and self._plan.num_workers)

    @contextmanager
    def generators_restored(self) -> Iterator[None]:
        """Set the generators to the state while the sampler's iterator is made."""
        resume = self.resume
        if resume.begins is Begins.AS_TORCH:
            yield
            return
        before = torch.get_rng_state()
        saved = resume.replay.generators.get(DEFAULT, before)
        # If the training code has restored torch's generator, a new epoch draws from it as usual.
        fresh = resume.begins is Begins.FRESH
        keeps = resume.as_they_stand or (fresh and torch.equal(saved, before))
        self._eager, self._default = not keeps, before
        try:
            self._plan.samplers.set_generators(resume.replay.generators, resume.replay.epoch)
            yield
        except BaseException:
            torch.set_rng_state(before)
            raise
        if not keeps:
            torch.set_rng_state(before)
        if resume.dataset is not None:  # after the generators: the dataset may contain one of them
            load_into(self._plan.dataset, resume.dataset, "the dataset")
            if self._plan.num_workers:  # only copies of it begin an epoch
                undo_load(self._plan.dataset)

    def replace_draws(self, iterator: Any) -> None:
        """Replace the values that torch's base class has drawn for `iterator` by those of the state."""
        resume, plan, begins = self.resume, self._plan, self.resume.begins
        if begins is Begins.AS_TORCH:
            return
        if resume.base_seed is not None:
            iterator._base_seed = resume.base_seed
        if resume.shared_seed not in (None, iterator._shared_seed):
            iterator._shared_seed = resume.shared_seed
            iterator._dataset = seed_datapipe(iterator._dataset, resume.shared_seed)
        if plan.iterable and not (begins is Begins.FRESH and iterator._shared_seed is None):
            if resume.as_they_stand and begins is Begins.OVER and resume.base_seed is None:
                # A different seed from that of the finished epoch.
                iterator._base_seed = plan.samplers.draw_seed()
            return
        if begins is Begins.FRESH:  # undo torch's draws: they are drawn again, or must not be drawn
            torch.set_rng_state(self._default)
        iterator._sampler_iter, seed = self._indices(resume)
        if resume.base_seed is None and seed is not None:
            iterator._base_seed = seed

    def _indices(self, resume: ResumePoint) -> IndicesAndSeed:
        samplers, replay = self._plan.samplers, resume.replay
        if resume.begins is Begins.EMPTY:  # the next epoch begins as if this one had just ended
            replay.restore(samplers)
            return iter(()), None
        if resume.begins is Begins.OVER:
            return self._indices_of_next_pass(resume)
        if resume.sampler is not None:
            found = load_sampler(
                samplers, resume.sampler, resume.since, replay.steps, begins=not resume.count
            )
            return (iter(()), None) if self._is_through(resume) else found
        eager = self._eager and DEFAULT in replay.generators
        return replay.indices(samplers, resume.count, resume.check, eager=eager)

    def _is_through(self, resume: ResumePoint) -> bool:
        """Return True if the sampler is at its next epoch: so hybridloader's samplers mark an end.

        This asks the sampler that has loaded the state. With another number of ranks, ``uneven="drop"``
        may drop the whole rest.
        """
        upcoming = getattr(self._plan.samplers.stateful, "upcoming_state_dict", None)
        start = resume.replay.start
        if upcoming is None or start is None:
            return False
        where = upcoming()
        # A late `set_epoch` may have changed the epoch since its start.
        return bool(where["epoch"] > start.kept["epoch"]) and not where["position"]

    def _indices_of_next_pass(self, resume: ResumePoint) -> IndicesAndSeed:
        """Make the iterator of the epoch after one that was declared over by an edited state."""
        samplers, replay = self._plan.samplers, resume.replay
        if resume.sampler is not None:
            load_sampler(samplers, resume.sampler, resume.since, replay.steps)
            stateful = samplers.stateful
            where = stateful.upcoming_state_dict() if has(stateful, "upcoming_state_dict") else {}
            if where.get("position"):
                stateful.set_epoch(where["epoch"] + 1)
        else:
            epoch = replay.at_later_epoch(samplers).epoch
            indices, _ = replay.indices(samplers, 0, None, eager=False)
            # To the end: RandomSampler draws one more permutation there, which it does not use.
            deque(indices, maxlen=0)
            samplers.announce_epoch(epoch)
        self.replay = SamplerReplay.of(samplers, replay.later or replay.steps, replay.later)
        if resume.as_they_stand and resume.sampler is not None and self.replay.start is not None:
            # Until a sampler is asked again, its state may be that of the previous epoch.
            self.replay = self.replay._replace(start=resume.sampler.sampler)
        return self.replay.indices(samplers, 0, None, eager=True)

    def progress(self, base_seed: int, shared_seed: int | None) -> Progress:
        """Make the progress of this epoch, and record it as the loader's."""
        plan, resume, record = self._plan, self.resume, self._plan.record
        made = Progress(self.replay, self.epoch, plan.num_workers, iterable=plan.iterable)
        made.base_seed, made.shared_seed = base_seed, shared_seed
        made.division = self.division
        before = record.progress if self._again else None
        if before is not None and before.finished and before.stateful:
            made.resume_workers(before.ends())
        if self.loads:
            log(INFO, "loader: resumes in epoch %d after %d batches", self.epoch, resume.yielded)
        if resume.begins is not Begins.OVER:
            made.finished, made.count = resume.begins is Begins.EMPTY, resume.count
            made.yielded = made.resumed_at = resume.yielded
            if resume.count and not plan.iterable:
                state, number = resume.sampler, resume.count - resume.since
                made.at = resume.count - 1, UNKNOWN, state and SamplerCheckpoint(number, state)
            if resume.starts:
                made.resume_workers(resume.starts)
            made.last_worker = resume.last
        record.progress, record.loaded, record.begun = made, None, self.epoch
        return made

    def source(
        self, indices: Iterator[Any], progress: Progress, first: int, ahead: int | None
    ) -> Iterator[Any]:
        """Return the stage's source, whose first task is `first`; see `Progress.begin` for `ahead`."""
        if progress.iterable:
            progress.begin(first, None)
            return indices
        indices = self._plan.samplers.drawn_in_batches(indices, self._plan.takes_arrays)
        repeated = self.resume.whole
        progress.begin(first, ahead, repeated)
        access = self._plan.samplers.state_access(indices)
        if access is None:
            return chain(repeated, progress.logged(indices))
        if not progress.count and self._plan.samplers.stateful is None:
            progress.at = -1, UNKNOWN, SamplerCheckpoint(0, access[0]())
        return chain(repeated, progress.logged_with_states(indices, *access))

    def direct(self, dispatch: ResumedDispatch) -> None:
        """Have `dispatch` give the first task to the worker whose turn it is."""
        resume, dispatch.last = self.resume, None
        if resume.begins in (Begins.HERE, Begins.EMPTY):
            dispatch.last = (resume.count - len(resume.whole) - 1) % self._plan.readers
            if self._plan.iterable:
                dispatch.last = resume.last

    @cached_property
    def division(self) -> ShardDivision | None:
        """Division of the shards that the dataset names, if it does."""
        plan, resume = self._plan, self.resume
        if not plan.iterable:
            return None
        if resume.division is not None and resume.begins is not Begins.OVER:
            return resume.division
        return ShardDivision.of(plan.dataset, plan.readers)

    @property
    def starts(self) -> tuple[ShardStart, ...]:
        """Positions at which the workers begin."""
        resume, plan = self.resume, self._plan
        if not resume.starts:
            loaded = resume.dataset is not None and not plan.num_workers
            return (ShardStart(next_epoch=True),) if loaded and plan.iterable else ()
        if resume.begins is Begins.OVER and not any(start.next_epoch for start in resume.starts):
            return ()
        rereads = any(s.skip > s.position and not s.stateful for s in resume.starts)
        if rereads and self._plan.iterable and self.division is None:
            warn_once(
                f"{type(self._plan.dataset).__name__} has no state_dict() and load_state_dict() for its "
                "whole state, nor has its iterator, so each worker reads its part of it again up to its "
                "position. `loader.resuming` counts the samples",
                "read-again",
            )
        return resume.starts if resume.division is None else resume.division.sent(resume.starts)


def _replay_now(plan: LoaderPlan, *, again: bool) -> tuple[SamplerReplay, bool]:
    """Return the replay of an epoch that begins now, and True if torch would begin it in this way.

    After a state was loaded, an epoch begins as in the saved loader, even if this loader has other
    workers. So all epochs are equal to those of the saved run. A data pipe begins as in torch.
    """
    as_torch, progress = steps_of(plan.num_workers, again=again), plan.record.progress
    later = None if progress is None or is_datapipe(plan.dataset) else progress.replay.later
    steps = later or as_torch
    return SamplerReplay.of(plan.samplers, steps, later), steps == as_torch


def state_of(plan: LoaderPlan, *, stays: bool) -> dict[str, Any]:
    """Return the state of a loader; `stays` if its workers are kept for the next epoch."""
    waiting, progress = plan.record.loaded, plan.record.progress
    if waiting is not None:
        return dict(copied(dict(waiting)))
    if progress is not None:
        progress.settle()
        if not progress.finished:
            return written(plan, progress, WITHIN)
    replay, _ = _replay_now(plan, again=stays and progress is not None)
    upcoming = Progress(replay, plan.epoch, plan.num_workers, iterable=plan.iterable)
    if plan.iterable:
        upcoming.division = ShardDivision.of(plan.dataset, plan.readers)
    if progress is not None:
        upcoming.base_seed, upcoming.yielded = progress.base_seed, progress.yielded
        upcoming.count = progress.count
        if stays and plan.num_workers:
            upcoming.resume_workers(progress.ends())
        elif not plan.num_workers:  # `written` asks the dataset itself
            upcoming.places = [
                ShardStart(iterator=end.iterator, next_epoch=end.iterator is not None)
                for end in progress.ends()
            ]
    return written(plan, upcoming, START if progress is None else END)


def load(plan: LoaderPlan, state: Any) -> int | None:
    """Make `state` the start of the loader's next epoch; return its number, or None without a state."""
    if isinstance(state, Mapping) and not state:
        plan.record.loaded = None  # as in torchdata, an empty dict is no state
        return None
    resume = read(plan, state)
    plan.record.loaded = copied(dict(state))
    return resume.next_epoch


def leave_for_epoch(plan: LoaderPlan, epoch: int) -> None:
    """Drop the loaded state, with a warning, if it is of another epoch than `epoch`."""
    state = plan.record.loaded
    if state is None or (place := read(plan, state).next_epoch) == epoch:
        return
    plan.record.loaded = None
    warn(place_dropped(epoch, place), "position-dropped")
