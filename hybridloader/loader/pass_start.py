"""How a pass of a loader begins, from its beginning or from a state that was loaded.

What a loaded state moves is moved here, in one order: the generators, the sampler, the dataset, and only
then workers start. A pass of a loader that has loaded nothing does nothing here but note how it began.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

from hybridloader._support.attributes import attribute, has
from hybridloader._support.caller import warn, warn_once
from hybridloader._support.datapipes import seed_datapipe
from hybridloader._support.state_copies import copied, load_into
from hybridloader.engine.dataset_state import ShardStart
from hybridloader.engine.scheduler import ACTIVE, Dispatch, Scheduler, round_robin
from hybridloader.fetching.fetch import Apart
from hybridloader.loader.progress import UNKNOWN, Base, Progress
from hybridloader.loader.sampler_replay import (
    AGAIN,
    FIRST,
    FIRST_WITHOUT_WORKERS,
    Replayed,
    SamplerReplay,
    load_sampler,
    replay,
)
from hybridloader.loader.samplers import DEFAULT
from hybridloader.loader.state import END, START, WITHIN, Resume, read, written

if TYPE_CHECKING:
    from hybridloader.loader.plan import LoaderPlan


class FirstOf:
    """A rule for dispatch, but for the first tasks of a pass.

    Attributes
    ----------
    first
        Who gets these, in order.
    last
        Behind whom it is the turn of the next; None: as the rule says.
    """

    def __init__(self, rule: Dispatch) -> None:
        self._rule = rule
        self.first: tuple[int, ...] = ()
        self.last: int | None = None

    def __call__(self, scheduler: Scheduler) -> int | None:
        if self.last is not None:
            given, states = scheduler.next_in - scheduler.first, scheduler.workers
            if given < len(self.first) and states[self.first[given]] in ACTIVE:
                return self.first[given]
            if given == len(self.first):
                return round_robin(scheduler, self.last)
        return self._rule(scheduler)


class PassStart:
    """The beginning of one pass.

    Parameters
    ----------
    plan
        What the loader says.
    again
        Whether workers of the pass before stay.

    Attributes
    ----------
    resume
        What it goes on from; None: it begins at the beginning.
    epoch
        The number of the pass.
    """

    def __init__(self, plan: LoaderPlan, *, again: bool) -> None:
        self._plan, self._again = plan, again
        samplers, state = plan.samplers, plan.record.loaded
        self.resume: Resume | None = None if state is None else read(plan, state)
        if self.resume is not None and self.resume.fresh:
            self.resume.making = self.resume.making.as_told(samplers)
        if self.resume is not None and self.resume.as_they_stand:
            self.resume.making = SamplerReplay.of(samplers, self.resume.making.steps)
        self.making = SamplerReplay.of(samplers, steps_of(plan, again=again))
        self.epoch = plan.epoch if self.resume is None else self.resume.next_epoch
        self._eager = False

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """While the sampler's iterator is made, the generators stand as the state says."""
        if self.resume is None:
            yield
            return
        import torch

        before = torch.get_rng_state()
        saved = self.resume.making.generators.get(DEFAULT)
        # Where the training code has restored it, a new pass draws from it as if nothing had happened.
        keeps = self.resume.fresh and saved is not None and torch.equal(saved, before)
        keeps = keeps or self.resume.as_they_stand
        self._eager = not keeps
        try:
            making = self.resume.making
            self._plan.samplers.set_generators(making.generators, making.epoch)
            yield
        except BaseException:
            torch.set_rng_state(before)
            raise
        if not keeps:
            torch.set_rng_state(before)
        if self.resume.dataset is not None:  # which may hold that very generator
            load_into(self._plan.dataset, self.resume.dataset, "the dataset")

    def move(self, iterator: Any) -> None:
        """Bring the iterator, the sampler and the dataset to the place of the state."""
        resume, plan = self.resume, self._plan
        plan.record.begun = self.epoch
        if resume is None:
            return
        if resume.base_seed is not None:
            iterator._base_seed = resume.base_seed
        if resume.shared_seed is not None:
            iterator._shared_seed = resume.shared_seed
            iterator._dataset = seed_datapipe(iterator._dataset, resume.shared_seed)
        if plan.iterable:
            if resume.as_they_stand and resume.over and resume.base_seed is None:
                # Another than the pass had that is over.
                iterator._base_seed = plan.samplers.draw_seed()
            return
        iterator._sampler_iter, seed = self._replayed(resume)
        if resume.base_seed is None and seed is not None:
            iterator._base_seed = seed

    def _replayed(self, resume: Resume) -> Replayed:
        samplers = self._plan.samplers
        if resume.empty:  # the pass after it begins as if it had just ended
            resume.making.restore(samplers)
            return iter(()), None
        if resume.over:
            return self._behind_the_end(resume)
        if resume.snapshot is not None:
            replayed = load_sampler(
                samplers,
                resume.snapshot,
                resume.since,
                resume.making.steps,
                begins=not resume.count,
            )
            return (iter(()), None) if self._is_through(resume) else replayed
        eager = self._eager and DEFAULT in resume.making.generators
        return replay(samplers, resume.making, resume.count, resume.check, eager=eager)

    def _is_through(self, resume: Resume) -> bool:
        """True if the sampler is at its next epoch, as ours tell the end of one.

        The sampler that has loaded the state is asked: with another number of ranks, what is left may be
        too little for ``uneven="drop"``.
        """
        upcoming = attribute(self._plan.samplers.stateful, "upcoming_state_dict", None)
        start = resume.making.start
        if upcoming is None or start is None:
            return False
        return bool(upcoming()["epoch"] > start.kept["epoch"])

    def _behind_the_end(self, resume: Resume) -> Replayed:
        """The pass after one that somebody has declared over."""
        samplers, making = self._plan.samplers, resume.making
        if resume.snapshot is not None:
            load_sampler(samplers, resume.snapshot, resume.since, making.steps)
            stateful = samplers.stateful
            where = stateful.upcoming_state_dict() if has(stateful, "upcoming_state_dict") else {}
            if where.get("position"):
                stateful.set_epoch(where["epoch"] + 1)
        else:
            epoch = making.as_told(samplers).epoch
            indices, _ = replay(samplers, making, 0, None, eager=False)
            # To the end: RandomSampler draws a permutation more there, of which it uses nothing.
            deque(indices, maxlen=0)
            samplers.tell_epoch(epoch)
        self.making = SamplerReplay.of(samplers, making.steps)
        if resume.as_they_stand and resume.snapshot is not None and self.making.start is not None:
            # What a sampler says of itself before it is asked again may be of the pass before.
            self.making = self.making._replace(start=resume.snapshot.sampler)
        return replay(samplers, self.making, 0, None, eager=True)

    def progress(self, iterator: Any) -> Progress:
        """The counts of this pass, which are the loader's from now on."""
        plan, resume, record = self._plan, self.resume, self._plan.record
        made = Progress(self.making, self.epoch, plan.readers, iterable=plan.iterable)
        made.base_seed, made.shared_seed = int(iterator._base_seed), iterator._shared_seed
        before = record.progress if self._again else None
        if before is not None and before.finished:
            made.go_on(before.ends())
        if resume is not None and not resume.over:
            made.making, made.finished = resume.making, resume.empty
            _go_on(made, resume)
        record.progress, record.loaded = made, None
        return made

    def source(
        self, iterator: Any, progress: Progress, first: int, ahead: int | None
    ) -> Iterator[Any]:
        """Return the stage's source, whose first task is `first`; `ahead` as of `Progress.begin`."""
        indices: Iterator[Any] = iterator._sampler_iter
        if progress.iterable:
            progress.begin(first, None)
            return indices
        leads = self._leads()
        progress.begin(first, ahead, leads)
        taken = self._plan.samplers.snapshots(indices)
        if taken is None:
            return chain(leads, progress.drawing(indices))
        if not progress.behind and self._plan.samplers.stateful is None:
            progress.at = -1, UNKNOWN, Base(0, taken[0]())
        return chain(leads, progress.drawing_with_states(indices, *taken))

    def _leads(self) -> list[Any]:
        resume = self.resume
        if resume is None:
            return []
        leads: list[Any] = []
        if resume.apart:
            apart = Apart(resume.apart)
            size = self._plan.batch_size or 0
            apart.wanted = size if 0 < size <= len(apart) else 0
            leads.append(apart)
        return [*leads, *resume.whole]

    def direct(self, dispatch: FirstOf) -> None:
        """Say whose turn it is."""
        dispatch.first, dispatch.last = (), None
        resume = self.resume
        if resume is None or resume.fresh or resume.over:
            return
        if self._plan.iterable:
            dispatch.first, dispatch.last = resume.first, resume.last
        else:
            dispatch.last = (resume.count - len(self._leads()) - 1) % self._plan.readers

    @property
    def starts(self) -> tuple[ShardStart, ...]:
        """Where the workers go on."""
        resume = self.resume
        if resume is None or not resume.starts:
            return ()
        if resume.over and not any(start.behind for start in resume.starts):
            return ()
        told = any(s.skip > s.position and not s.stateful for s in resume.starts)
        if told and self._plan.iterable:
            warn_once(
                f"{type(self._plan.dataset).__name__} has no state_dict() and load_state_dict(), nor "
                "has its iterator, so each worker reads its part of it again up to where it had come. "
                "`loader.resuming` tells how far that is"
            )
        return resume.starts


def _go_on(progress: Progress, resume: Resume) -> None:
    progress.yielded = resume.yielded
    progress.behind = resume.count
    if resume.count and not progress.iterable:
        base = resume.snapshot and Base(resume.count - resume.since, resume.snapshot)
        progress.at = resume.count - 1, UNKNOWN, base
    if resume.starts:
        progress.go_on(resume.starts)
    progress.first, progress.last_worker = resume.first, resume.last


def steps_of(plan: LoaderPlan, *, again: bool) -> tuple[str, ...]:
    if again:
        return AGAIN
    return FIRST if plan.num_workers else FIRST_WITHOUT_WORKERS


def state_of(plan: LoaderPlan, *, stays: bool) -> dict[str, Any]:
    """The state of a loader, whose workers may stay for another pass."""
    waiting, progress = plan.record.loaded, plan.record.progress
    if waiting is not None:
        return dict(copied(dict(waiting)))
    if progress is not None:
        progress.settle()
        if not progress.finished:
            return written(plan, progress, WITHIN)
    again = stays and progress is not None
    making = SamplerReplay.of(plan.samplers, steps_of(plan, again=again))
    next_one = Progress(making, plan.epoch, plan.readers, iterable=plan.iterable)
    if progress is not None:
        next_one.base_seed, next_one.yielded = progress.base_seed, progress.yielded
        next_one.behind = progress.behind
        if stays and plan.num_workers:
            next_one.go_on(progress.ends())
        elif not plan.num_workers:  # the dataset itself is asked below
            next_one.places = [
                ShardStart(iterator=end.iterator, behind=end.iterator is not None)
                for end in progress.ends()
            ]
    return written(plan, next_one, START if progress is None else END)


def load(plan: LoaderPlan, state: Any) -> int | None:
    """Have the next pass of the loader go on from `state`. Return its epoch; None: there is no state."""
    if isinstance(state, Mapping) and not state:
        plan.record.loaded = None  # torchdata's way to say that there is none
        return None
    resume = read(plan, state)
    plan.record.loaded = copied(dict(state))
    return resume.next_epoch


def leave_for_epoch(plan: LoaderPlan, epoch: int) -> None:
    """Another epoch is wanted than that of the state that was loaded."""
    state = plan.record.loaded
    if state is None or (place := read(plan, state).next_epoch) == epoch:
        return
    plan.record.loaded = None
    warn(
        f"set_epoch({epoch}) drops the place that was loaded, which is in epoch {place}; load the state "
        "after set_epoch(), or start with that epoch",
    )
