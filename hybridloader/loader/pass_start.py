"""Start of an epoch of a loader: at its beginning, or at the position of a state.

A loaded state is applied in this order: the generators, the sampler, the dataset; then workers start.
For a loader without a loaded state, only the start of the epoch is recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch

from hybridloader._support.states import copied, load_into, place_dropped
from hybridloader._support.text import INFO, log, warn, warn_once
from hybridloader._support.torch_env import is_datapipe
from hybridloader._support.user_objects import attribute, has
from hybridloader.engine.dataset_state import ShardStart, load_for_epoch, undo_load
from hybridloader.engine.scheduler import ACTIVE, Dispatch, Scheduler, round_robin
from hybridloader.fetching.readers import PartialBatch
from hybridloader.fetching.shards import ShardDivision
from hybridloader.loader.plan import LoaderPlan
from hybridloader.loader.progress import UNKNOWN, Progress, SamplerCheckpoint
from hybridloader.loader.samplers import (
    DEFAULT,
    IndicesAndSeed,
    SamplerReplay,
    load_sampler,
    steps_of,
)
from hybridloader.loader.state import END, START, WITHIN, ResumePoint, read, written

_NOTHING = nullcontext()


class ResumedDispatch:
    """Rule of dispatch, with an exception for the first tasks of a resumed epoch."""

    def __init__(self, rule: Dispatch) -> None:
        self._rule = rule
        self.first: tuple[int, ...] = ()
        """Workers that get the first tasks, in order."""
        self.last: int | None = None
        """Worker whose turn was before the task after these; None: the rule alone decides."""

    def __call__(self, scheduler: Scheduler) -> int | None:
        if self.last is not None:
            given, states = scheduler.next_in - scheduler.first, scheduler.workers
            if given < len(self.first) and states[self.first[given]] in ACTIVE:
                return self.first[given]
            if given == len(self.first):
                return round_robin(scheduler, self.last)
        return self._rule(scheduler)


class Drawn(NamedTuple):
    """Values that torch's base class draws for an epoch; those of a loaded state replace them."""

    indices: Iterator[Any]
    """Iterator of the sampler."""
    base_seed: int
    """Seed of the workers."""
    shared_seed: int | None
    """Seed that data pipes share among ranks; None for other datasets."""


class PassStart:
    """Start of one epoch; `again` if the workers of the previous epoch are kept."""

    def __init__(self, plan: LoaderPlan, *, again: bool) -> None:
        self._plan, self._again = plan, again
        samplers, state, before = plan.samplers, plan.record.loaded, plan.record.progress
        if before is not None and (before.finished or before.yielded > before.resumed_at):
            for thing in (plan.dataset, samplers.stateful):  # an epoch has used their loads
                undo_load(thing)
        self.loads = state is not None
        """True if a state was loaded."""
        self.replay, as_torch = _replay_now(plan, again=again)
        resume = None if state is None else read(plan, state)
        if resume is None and before is not None and not as_torch:
            resume = ResumePoint(self.replay, plan.epoch, fresh=True)
            if plan.seeded_by_sample and "seed" not in self.replay.steps:
                resume.base_seed = before.base_seed
        self.resume = resume
        """Position at which the epoch resumes; None if it begins at its beginning, as in torch."""
        if resume is not None and resume.fresh:
            resume.replay = resume.replay.at_later_epoch(samplers)
        if resume is not None and resume.as_they_stand:
            resume.replay = SamplerReplay.of(samplers, resume.replay.steps)
        self.epoch = plan.epoch if resume is None else resume.next_epoch
        """Number of the epoch."""
        self._eager = False
        self._default: Any = None  # state of torch's default generator before the epoch

    @property
    def seed_stays(self) -> bool:
        """True if later epochs use the same seed for the workers."""
        replay = self.replay if self.resume is None else self.resume.replay
        if replay.later is not None:
            return "seed" not in replay.later
        return bool(self._plan.persistent_workers and self._plan.num_workers)

    def generators_restored(self) -> AbstractContextManager[None]:
        """Set the generators to the state while the sampler's iterator is made."""
        return _NOTHING if self.resume is None else self._restored(self.resume)

    @contextmanager
    def _restored(self, resume: ResumePoint) -> Iterator[None]:
        before = torch.get_rng_state()
        saved = resume.replay.generators.get(DEFAULT, before)
        # If the training code has restored torch's generator, a new epoch draws from it as usual.
        keeps = resume.as_they_stand or (resume.fresh and torch.equal(saved, before))
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
            load = load_for_epoch if self._plan.iterable else load_into
            load(self._plan.dataset, resume.dataset, "the dataset")
            if self._plan.num_workers:  # only copies of it begin an epoch
                undo_load(self._plan.dataset)

    def resumed(self, drawn: Drawn) -> Drawn:
        """Return `drawn`, torch's draws for a new epoch, with the values of the loaded state."""
        resume, plan = self.resume, self._plan
        if resume is None:
            return drawn
        if resume.base_seed is not None:
            drawn = drawn._replace(base_seed=resume.base_seed)
        if resume.shared_seed is not None:
            drawn = drawn._replace(shared_seed=resume.shared_seed)
        if plan.iterable and not (resume.fresh and drawn.shared_seed is None):
            if resume.as_they_stand and resume.over and resume.base_seed is None:
                # A different seed from that of the finished epoch.
                return drawn._replace(base_seed=plan.samplers.draw_seed())
            return drawn
        if resume.fresh:  # undo torch's draws: they are drawn again, or must not be drawn
            torch.set_rng_state(self._default)
        indices, seed = self._indices(resume)
        if resume.base_seed is None and seed is not None:
            drawn = drawn._replace(base_seed=seed)
        return drawn._replace(indices=indices)

    def _indices(self, resume: ResumePoint) -> IndicesAndSeed:
        samplers, replay = self._plan.samplers, resume.replay
        if resume.empty:  # the next epoch begins as if this one had just ended
            replay.restore(samplers)
            return iter(()), None
        if resume.over:
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
        upcoming = attribute(self._plan.samplers.stateful, "upcoming_state_dict", None)
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

    def progress(self, drawn: Drawn) -> Progress:
        """Make the progress of this epoch, and record it as the loader's."""
        plan, resume, record = self._plan, self.resume, self._plan.record
        made = Progress(self.replay, self.epoch, plan.num_workers, iterable=plan.iterable)
        made.base_seed, made.shared_seed = int(drawn.base_seed), drawn.shared_seed
        made.division = self.division
        before = record.progress if self._again else None
        if before is not None and before.finished and before.stateful:
            made.resume_workers(before.ends())
        if resume is not None and self.loads:
            log(INFO, "loader: resumes in epoch %d after %d batches", self.epoch, resume.yielded)
        if resume is not None and not resume.over:
            made.replay, made.finished = resume.replay, resume.empty
            made.yielded, made.count = resume.yielded, resume.count
            made.resumed_at = made.yielded
            if resume.count and not plan.iterable:
                state, number = resume.sampler, resume.count - resume.since
                made.at = resume.count - 1, UNKNOWN, state and SamplerCheckpoint(number, state)
            if resume.starts:
                made.resume_workers(resume.starts)
            made.first, made.last_worker = resume.first, resume.last
        record.progress, record.loaded, record.begun = made, None, self.epoch
        return made

    def source(
        self, indices: Iterator[Any], progress: Progress, first: int, ahead: int | None
    ) -> Iterator[Any]:
        """Return the stage's source, whose first task is `first`; see `Progress.begin` for `ahead`."""
        if progress.iterable:
            progress.begin(first, None)
            return indices
        indices = self._plan.samplers.drawn_in_batches(indices, arrays=self._plan.takes_arrays)
        repeated = self._repeated()
        progress.begin(first, ahead, repeated)
        access = self._plan.samplers.state_access(indices)
        if access is None:
            return chain(repeated, progress.logged(indices))
        if not progress.count and self._plan.samplers.stateful is None:
            progress.at = -1, UNKNOWN, SamplerCheckpoint(0, access[0]())
        return chain(repeated, progress.logged_with_states(indices, *access))

    def _repeated(self) -> list[Any]:
        """Items that are fetched again before the sampler continues."""
        resume = self.resume
        if resume is None:
            return []
        repeated: list[Any] = []
        if resume.apart:
            apart = PartialBatch(resume.apart)
            size = self._plan.batch_size or 0
            apart.wanted = size if 0 < size <= len(apart) else 0
            repeated.append(apart)
        return [*repeated, *resume.whole]

    def direct(self, dispatch: ResumedDispatch) -> None:
        """Have `dispatch` give the first tasks to the workers whose turn it is."""
        dispatch.first, dispatch.last = (), None
        resume = self.resume
        if resume is None or resume.fresh or resume.over:
            return
        if self._plan.iterable:
            dispatch.first, dispatch.last = resume.first, resume.last
        else:
            dispatch.last = (resume.count - len(self._repeated()) - 1) % self._plan.readers

    @cached_property
    def division(self) -> ShardDivision | None:
        """Division of the shards that the dataset names, if it does."""
        plan, resume = self._plan, self.resume
        if not plan.iterable:
            return None
        if resume is not None and resume.division is not None and not resume.over:
            return resume.division
        return ShardDivision.of(plan.dataset, plan.readers)

    @property
    def starts(self) -> tuple[ShardStart, ...]:
        """Positions at which the workers begin."""
        resume, plan = self.resume, self._plan
        if resume is None or not resume.starts:
            loaded = resume is not None and resume.dataset is not None and not plan.num_workers
            return (ShardStart(next_epoch=True),) if loaded and plan.iterable else ()
        if resume.over and not any(start.next_epoch for start in resume.starts):
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
