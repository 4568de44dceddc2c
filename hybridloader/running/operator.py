"""Steps of a pipeline: each is a frozen description, and makes an iterator over the iterator before it.

A description holds no thread, file or position, so it can be pickled, compared and used any number of
times. The iterator that `Operator.open` makes holds all the state; one thread pulls it. An error of the
iterator before it passes through, and pulling again continues after the item that failed: so an iterator
is a class with `__next__` rather than a generator, which would be over after an exception.
"""

from __future__ import annotations

import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypedDict

from hybridloader._support.text import (
    beginning,
    flag,
    function,
    keywords,
    seconds,
    spelled_out,
    whole,
)
from hybridloader._support.user_objects import attribute, close, counts_as_item, takes_a_place
from hybridloader.engine.contract import Backend, get_backend
from hybridloader.engine.scheduler import IN_FLIGHT
from hybridloader.engine.stage import RestartPolicy
from hybridloader.fetching.on_error import Policy, Replace, Retry, Skip, final, parse_on_error
from hybridloader.memory.limits import ranks_here
from hybridloader.seeding.sample_rng import SampleSeeding, parse_seeding

if TYPE_CHECKING:
    from hybridloader.devices.pinning import Pinner


class Where(TypedDict, total=False):
    """The keywords of a stage; see `Placement`."""

    backend: str | Backend | None
    num_workers: int | None
    in_order: bool
    prefetch: int | None
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    threads_per_worker: int
    concurrency: int
    fuse: bool
    on_error: str | Skip | Retry | Replace | None
    on_worker_death: str | RestartPolicy | None
    task_timeout: float
    seeding: str | SampleSeeding | None


@dataclass(frozen=True)
class Placement:
    """Placement of a stage: its backend, its workers and their options.

    Parameters
    ----------
    backend
        Name of a backend, or a `Backend`. None and ``"inline"`` do the work on the thread that asks for
        the result.
    num_workers
        Number of workers, at least 1; ignored inline. None: the number of cores, by affinity and quota.
        If several ranks of a job run on this machine, an even share of its cores.
    in_order
        True returns results in the order of the items, False as they are done.
    prefetch
        Number of items of this stage that may be in flight, or done and not yet taken. None: two tasks
        for each worker, three with `threads_per_worker` and eight with `concurrency`.
    timeout
        Seconds to wait for the next result while a task is in flight; 0 sets no limit.
    worker_init_fn
        Called in each worker with its number before anything else; inline, with 0.
    threads_per_worker
        Number of threads in each worker. They work on the oldest task first, and then on the next.
    concurrency
        Coroutines of an ``async def`` function that each worker runs at a time, on one event loop. It
        needs no backend.
    fuse
        True if this work may be one task with that of the stages beside it that have the same workers.
        They then share the limit of `on_error`, and its records name them as one stage.
    on_error
        Policy for items that fail. None (or ``"raise"``) raises the error where the item would have
        been returned. ``"skip"``, or a `Skip`, leaves the item out. A `Retry` tries again first. A
        `Replace` substitutes another item. It needs no backend.
    on_worker_death
        None (or ``"raise"``) raises `WorkerDied`. ``"restart"``, or a `RestartPolicy`, restarts a
        worker that dies.
    task_timeout
        Seconds that a worker may take for a task; 0 sets no limit.
    seeding
        Seeding of the random numbers that functions draw. ``"sample"``, or a `SampleSeeding`, seeds
        every item by its number in the stage's input (a sample of a dataset by its index). None does so
        on threads, for all functions of a stage together; in processes it seeds each worker once.
        ``"worker"`` seeds each worker once. ``"shared"`` does not seed threads. It needs no backend.
    ranks
        Number of ranks on this machine, if `num_workers` follows from it.
    """

    backend: Backend | None = None
    num_workers: int = 1
    in_order: bool = True
    prefetch: int | None = None
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    threads_per_worker: int = 1
    concurrency: int = 1
    fuse: bool = True
    on_error: Policy | None = None
    on_worker_death: RestartPolicy | None = None
    task_timeout: float = 0
    seeding: SampleSeeding | str | None = None
    ranks: int = field(default=1, compare=False)

    @classmethod
    def of(cls, stage: str, where: Where) -> Placement:
        """Make the placement of `stage` from a user's keywords, and check it."""
        keywords(f"stage {stage!r}", where, Where.__annotations__)
        given: dict[str, Any] = {key: value for key, value in where.items() if value is not None}
        faults = {
            key: of(given.pop(key), f"stage {stage!r}: {key}")
            for key, of in _POLICIES.items()
            if key in given
        }
        if "concurrency" in given:
            faults["concurrency"] = whole(
                f"stage {stage!r}: concurrency", given.pop("concurrency"), 1
            )
        backend, workers = given.pop("backend", None), given.pop("num_workers", None)
        if backend is None and (given or workers is not None or faults.get("on_worker_death")):
            keys = ", ".join(key for key in where if key not in _ANYWHERE)
            raise ValueError(
                f"stage {stage!r} has {keys} but no backend, so the calling thread "
                "would do its work; pass a backend, such as backend='threads'"
            )
        for name in given.keys() & {"prefetch", "threads_per_worker"}:
            given[name] = whole(f"stage {stage!r}: {name}", given[name], 1)
        if backend is None:
            return cls(**given, **faults)
        try:
            chosen = get_backend(backend)
        except (ValueError, TypeError) as error:
            raise type(error)(f"stage {stage!r}: {error}") from error
        if workers is None:
            from hybridloader.observe.measures import share

            ranks = given["ranks"] = ranks_here()
            workers = math.ceil(share(ranks))  # the cores of this process
        workers = whole(f"stage {stage!r}: num_workers", workers, 1)
        for name in given.keys() & {"timeout", "task_timeout"}:
            seconds(f"stage {stage!r}: {name}", given[name])
        for name in given.keys() & {"in_order", "fuse"}:
            given[name] = flag(f"stage {stage!r}: {name}", given[name])
        if "worker_init_fn" in given:
            function(f"stage {stage!r}: worker_init_fn", given["worker_init_fn"], "callable")
        return cls(backend=chosen, num_workers=workers, **given, **faults)

    @property
    def least(self) -> int:
        """Items of a task, if there are as many, so that a worker has enough to do at once."""
        if self.concurrency > 1:
            return self.concurrency if self._overlaps else _ROUNDS * self.concurrency
        return self.threads_per_worker

    @property
    def at_hand(self) -> int:
        """Tasks that a worker has at most, if any worker may do them."""
        if not self._overlaps:
            return IN_FLIGHT
        return _AHEAD if self.concurrency > 1 else _BEHIND

    @property
    def _overlaps(self) -> bool:
        """True if a worker may process items of several tasks at a time; see `WorkerSpec.overlaps`."""
        watched = self.on_worker_death is not None or self.task_timeout
        several = self.concurrency > 1 or self.threads_per_worker > 1
        return several and not self.inline and not watched

    @property
    def inline(self) -> bool:
        return self.backend is None or self.backend.in_caller


_AHEAD = 8
"""Tasks prefetched for a worker whose coroutines may be of several, each of as many items as run at a
work. With waits that are exponentially distributed, and 32 at a time, it does as much as asyncio alone:
0.95 of what it could, head and tail of the epoch included. With 2 tasks of four times as many: 0.88."""

_BEHIND = 3
"""Tasks prefetched for a worker whose threads may share several: one that ends, one that runs, and one
after it. Of items that wait for 20 ms and compute for 4.4, with 16 threads in each of two processes,
two cores are busy for 0.94 of the time; with two tasks 0.89, with four tasks 0.95."""

_ROUNDS = 4
"""Items of a task for each coroutine at a time where a worker is watched, so that it ends a task before
it begins the next. With the waits above it does 0.53 of what it could; with equal waits, 0.9."""

_ANYWHERE = ("backend", "on_error", "seeding", "concurrency")  # keywords that need no backend

_POLICIES: dict[str, Callable[[Any, str], Any]] = {
    "on_error": parse_on_error,
    "on_worker_death": RestartPolicy.of,
    "seeding": parse_seeding,
}


_DEFAULTS = {one.name: one.default for one in fields(Placement)} | {"num_workers": None}

in_keywords = spelled_out(Where, _DEFAULTS)
"""Decorator of methods that take these keywords: their signature lists each with its default."""


Length = int | float | None
"""Number of items: an int, `INFINITE`, or None if it can't be known before they have come."""

INFINITE = math.inf

_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
"""Address of an object in its repr, which would make a description another one in every run."""

Upstream = Callable[..., Iterator[Any]]
"""Begins a new pass over the items before an operator, in its epoch; a later pass has the epoch after.

With ``epoch=`` the pass has that epoch, and with ``start=`` it begins after so many items.
"""


class Chain:
    """Operators from a source on, each fed by the one before it: the data of a `Pipeline`.

    Attributes
    ----------
    operators
        A `Source`, then any other operators.
    """

    __slots__ = ("operators", "planned")

    operators: tuple[Operator, ...]
    planned: tuple[Any, ...]
    """Plan of its latest run, without this chain; see `lay_out`."""

    @property
    def length(self) -> Length:
        """Number of items of an epoch: an int, ``math.inf``, or None if it can't be known."""
        length: Length = None
        for operator in self.operators:
            length = operator.length(length)
        return length


class Mark(NamedTuple):
    """Note of an operator for states: after `at` items of epoch `epoch`, it can resume from `value`.

    The value is a JSON value if states are to be saved as JSON.
    """

    epoch: int
    at: int
    value: Any


class UpstreamPart(NamedTuple):
    """Place where the items before an operator resume when the operator does."""

    branch: int | None
    """Number of a branch; None: the operators before in the same chain."""
    start: int
    """Number of items that are not wanted any more."""
    epoch: int
    """Number of the pass."""
    given: int | None = None
    """Number of its own items with which the operator begins; None: those that are asked for. It gives
    the others again, and they are dropped."""


class Needed(NamedTuple):
    """Items before an operator that it needs again when a run is resumed."""

    numbers: Collection[int]
    """Numbers of those before number `until`."""
    until: int
    """Number from which on all are needed."""


class RelayOptions(NamedTuple):
    """Options of a relay: a thread that pulls the items before it, and keeps them ready."""

    depth: int | None = None
    """Number of items that may wait; None: the plan decides."""
    pinner: Callable[[], Pinner | None] | None = None
    """Makes what pins or moves the items, for the device that is current; None: nothing does."""
    moves: bool = False
    """True if they are moved to a device."""


class Context(Protocol):
    """Values and services for an operator in one pass."""

    epoch: int
    """Number of this pass over the whole pipeline, from 0; a repetition counts as a pass."""
    seed: int | None
    """Seed that the user gave to the run; None if it was drawn."""
    run_seed: int
    """Seed of the run, whether given or drawn."""
    start: int
    """Number of its items that were given before: the first that it gives has that number.

    Above 0 only where `Operator.before` has returned that this can be done.
    """
    first: int
    """Number of the first item before it that it gets: those before that are not needed any more."""
    saved: Mark | None
    """Last mark of this operator in the run from which this one resumes."""
    needed: Needed | None
    """Result of `Operator.needed`, if it was asked."""

    def random(self, seed: int | None) -> random.Random:
        """Return a generator for this operator and pass: from `seed`, else from the run's own seed."""

    def draw(self) -> int:
        """Return a seed for this pass, from torch's default generator; the same again after resuming."""

    def open(self, pipeline: Chain, start: int = 0, number: int | None = None) -> Iterator[Any]:
        """Open another pipeline as a part of this one, after its first `start` items.

        It is closed with this one. `number` is that of its branch, if not the next.
        """

    def mark(self, at: int, value: Any) -> None:
        """Note that this operator could resume after its first `at` items from `value`."""

    def log(
        self, first: tuple[Any, ...], value_of: Callable[..., Any]
    ) -> Callable[[tuple[Any, ...]], None]:
        """Return a function that an operator calls for each of its items instead of `mark`.

        It is called with an entry before an item is given; an error counts as one. An entry is the
        number of items, that one included, and values of which ``value_of(*values)`` makes the value of
        the mark, only when a state is taken. `first` is the entry before any item. If it has no values,
        there need be no other, and ``value_of(n)`` makes the value of the mark after `n` items.
        """

    def drop(self, items: Iterator[Any], at: int) -> Iterator[Any]:
        """Return `items`, which are those from number `at` on, from number `start` on."""


class Operator(ABC):
    """One step of a pipeline; your own is a frozen dataclass with an `open`.

    The modules that run a pipeline ask each operator, and know none by its type. Only `open` has no
    default.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Pairs(Operator):
    ...     \"\"\"Each item with the one after it.\"\"\"
    ...
    ...     def open(self, items, context):
    ...         return PairsIterator(items)
    """

    placement: Placement | None = None
    """Workers of its `step`; None: the thread that pulls it runs it, or the thread of its `relay`."""
    cheap: bool = False
    """True if it only counts, selects or reorders items, so that it needs no thread before a stage."""
    goes_first: ClassVar[bool] = False
    """True if it selects items by their numbers alone: it is moved before one-to-one functions."""
    marks_inputs: ClassVar[bool] = False
    """True if it calls ``context.mark(n, k)`` wherever its items from number `n` on are made only of the
    items before it from number `k` on, as when nothing is in its buffer. Errors count as items. Instead
    of `k` it may give a list that begins with it, or None where this is not known."""
    begins_anew: ClassVar[bool] = False
    """True if it may begin with any items: nothing that it does depends on the numbers of items before.
    Only then can states of several ranks be merged."""
    makes_several: ClassVar[bool] = False
    """True if it makes any number of items of one."""
    counts_errors: ClassVar[bool] = False
    """True if `before` holds also where some of the items were errors."""
    not_fingerprinted: ClassVar[tuple[str, ...]] = ()
    """Fields that the fingerprint of a `cache` leaves out: they change no item, or hold `branches`."""
    read_once: bool = False
    """True for a source that can be read only once."""

    @property
    def name(self) -> str:
        """Name in tables and errors: that of the class, ``BatchBy`` as ``batch_by``."""
        return re.sub("(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def leaves_out(self) -> bool:
        """True if it leaves out items that fail."""
        return self.placement is not None and isinstance(final(self.placement.on_error), Skip)

    @property
    def relay(self) -> RelayOptions | None:
        """Options of the relay that it is, if it is one and nothing else."""
        return None

    @property
    def share(self) -> tuple[int, int] | None:
        """Number of ranks that share its items, and of this one now, if it selects items by rank."""
        return None

    def step(self) -> Any:
        """Return the `Step` that its workers do: a function to call, or a source to read."""
        return None

    def draws(self, seeded: bool) -> bool:
        """Return True if it calls `Context.draw`, in a run that is `seeded` or not."""
        return False

    def upcoming(self) -> str | None:
        """Return the value that the next epoch takes from those before, for states, if any."""
        return None

    def check_run(self) -> None:  # noqa: B027
        """Raise an exception if this operator can't run here. Called before any worker is started."""

    @abstractmethod
    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        """Return an iterator over the results of this operator for `items`."""

    def begin(self, upstream: Upstream, context: Context) -> Iterator[Any]:
        """Return that iterator; overridden by operators that pass over their input not just once."""
        return self.open(upstream(), context)

    def length(self, upstream: Length) -> Length:
        """Return the number of items that come out when `upstream` go in."""
        return None

    def seek(self, n: int) -> int | None:
        """Return how many items before it are not needed any more after its first `n` items, n above 0.

        It follows from the parameters alone, for items none of which raised; None, if it depends on the
        items or on chance. An operator that returns a number is opened after these items, with
        `Context.start` = `n`, when a run is resumed.
        """
        return None

    def before(self, n: int, epoch: int, mark: Mark | None) -> Sequence[UpstreamPart] | None:
        """Return where the items before it resume when this resumes after its first `n` items.

        None: that is not known, so all of them come again. `mark` is the last one up to there. An empty
        list: no item before it is needed, and with `n` = 0 no worker is started for them.
        """
        if n == 0:
            branches = None, *range(len(self.branches()))
            return [UpstreamPart(branch, 0, epoch) for branch in branches]
        if self.marks_inputs and mark is not None and mark.value is not None:
            start = mark.value[0] if isinstance(mark.value, list) else mark.value
            return [UpstreamPart(None, start, epoch, mark.at)]
        k = self.seek(n)
        return None if k is None else [UpstreamPart(None, k, epoch)]

    def needed(self, context: Context) -> Needed | None:
        """Return which items before it this operator needs again; None: all from `Context.first` on.

        It is asked before it is opened, if it resumes from a mark. In the place of each item that it
        does not need, an error is raised. Where the steps before make one item of one, their functions
        are not called for such an item.
        """
        return None

    def branches(self) -> tuple[Chain, ...]:
        """Return other pipelines that run as a part of this operator."""
        return ()

    def describe(self, longest: int | None = 40) -> str:
        """Return its name and those parameters that differ from their defaults.

        Parameters
        ----------
        longest
            Characters of a value that are shown; None: all.
        """
        shown_fields = []
        own: Any = self  # of a user's, which need not be a dataclass
        for entry in fields(own) if is_dataclass(own) else ():
            value = getattr(self, entry.name)
            required = entry.default is MISSING and entry.default_factory is MISSING
            if not entry.repr or (not required and value == entry.default):
                continue
            if longest is not None and type(value) in (list, tuple):
                value = value[:longest]  # the rest is not shown, and may be a million numbers
            shown = attribute(value, "__qualname__") or _ADDRESS.sub("", repr(value))
            shown = shown if longest is None else beginning(shown, longest)
            shown_fields.append(shown if required else f"{entry.name}={shown}")
        return f"{self.name}({', '.join(shown_fields)})"

    def identity(self) -> str | None:
        """Return its description in states: a run resumes only from a state with the same descriptions.

        None for a relay: the same items come in the same order without it.
        """
        return None if self.relay is not None else beginning(self.describe())


class OneForOne(Operator):
    """One output for each input, in its place."""

    counts_errors = True

    def seek(self, n: int) -> int | None:
        return n

    def length(self, upstream: Length) -> Length:
        return upstream


class Source(Operator):
    """First step of a pipeline, with nothing before it."""

    @abstractmethod
    def start(self, context: Context) -> Iterator[Any]:
        """Return an iterator over the items of an epoch."""

    def open(self, items: Iterator[Any], context: Context) -> Iterator[Any]:
        raise TypeError(f"{self.name} is a source; nothing can come before it")

    def begin(self, upstream: Upstream, context: Context) -> Iterator[Any]:
        return self.start(context)


def of_length(value: Length) -> str:
    """Describe a length in words."""
    if value is None:
        return "unknown"
    return "endless" if value == INFINITE else f"{int(value):,}"


def steps_in(chain: Chain) -> list[Operator]:
    """Return the operators of all chains that items come through, those of `chain` last."""
    branches = [branch for operator in chain.operators for branch in operator.branches()]
    return [*(step for branch in branches for step in steps_in(branch)), *chain.operators]


# -- checks of a user's parameters: operators refuse bad ones when they are described, not when they run
#
# Every error names the operator, or another object with a `name`, the parameter, its value and a remedy.


def settle(described: Any, **values: Any) -> None:
    """Set fields of a frozen description, from its ``__post_init__``."""
    for name, value in values.items():
        object.__setattr__(described, name, value)


def settle_whole(
    described: Any, parameter: str, least: int, instead: str, *, optional: bool = False
) -> None:
    """Make the field `parameter` an int that is at least `least`; or None, where it is optional."""
    value = getattr(described, parameter)
    if not (optional and value is None):
        name = f"{described.name}: {parameter}"
        settle(described, **{parameter: whole(name, value, least, instead=instead)})


def check_flags(described: Any, *parameters: str) -> None:
    """Refuse fields that are neither True nor False."""
    for parameter in parameters:
        flag(f"{described.name}: {parameter}", getattr(described, parameter))


SEED = "give an int from 0 up, or None for the seed of the run"  # request in errors about a seed


# -- iterators: each has all its mutable state in plain attributes, and never runs a thread ------------


nothing = iter(()).__next__  # that of an iterator which has ended


class OperatorIterator(Iterator[Any]):
    """Base of the iterators over one other, which is closed with this if it `owns` it."""

    owns = True

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        # A bound method: a call of one written in Python takes 40 ns less than `next(items)`.
        self._pull: Callable[[], Any] = items.__next__

    def __next__(self) -> Any:
        try:
            return self._pull()
        except StopIteration:
            self._end()
            raise

    def _end(self) -> None:
        """Note that the iterator before has ended; it is not asked again."""
        self._pull = nothing

    def _failed(self, error: Exception) -> bool:
        """Note an error of `_pull`; return True if it was raised in the place of an item."""
        if isinstance(error, StopIteration):
            self._end()
            return False
        return takes_a_place(error)

    def close(self) -> None:
        """Give up the rest, close the iterator before, and let it go with its buffers. Idempotent."""
        self._end()
        items, self._items = self._items, iter(())
        if self.owns:
            close(items)


class GeneratorIterator(OperatorIterator):
    """Iterator over a generator. An error ends it; the next call raises another, which `lost` makes.

    Another `StopIteration` would look as if all items had come.
    """

    def __init__(self, items: Iterator[Any], lost: Callable[[Exception], Exception]) -> None:
        super().__init__(items)
        self._lost = lost
        # All the mutable state:
        self._after: Exception | None = None

    def __next__(self) -> Any:
        if self._after is not None:
            after, self._after = self._after, None
            raise after
        try:
            return self._pull()
        except Exception as error:
            self._failed(error)
            if not isinstance(error, StopIteration):
                self._after = self._lost(error)
            raise


class NotingIterator(OperatorIterator):
    """Base of the iterators that note after each item, and after each error, where a run can resume."""

    def __next__(self) -> Any:
        try:
            item = self._make()
        except Exception as error:
            if counts_as_item(error):
                self._note()
            raise
        self._note()
        return item

    @abstractmethod
    def _make(self) -> Any:
        """Return the next item. Raises `StopIteration`, or an error in the place of an item."""

    @abstractmethod
    def _note(self) -> None:
        """Note that one more item, or error, is given."""


class PassesIterator(Iterator[Any]):
    """Base of the iterators over several passes, one after the other; where each began is marked."""

    def __init__(self, context: Context) -> None:
        self._mark, saved = context.mark, context.saved
        # All the mutable state:
        self._given = context.start  # items, and errors in their places
        self._begun: int = 0 if saved is None else saved.value  # passes
        self._since = None if saved is None else saved.at  # items before a pass that is resumed
        self._gave = True  # whether this pass gave anything
        self._ended = False
        self._items: Iterator[Any] | None = None
        self._pull: Callable[[], Any] = nothing

    @abstractmethod
    def _is_over(self) -> bool:
        """Return True if no repetition is left to begin."""

    @abstractmethod
    def _open(self, number: int, start: int) -> Iterator[Any]:
        """Return an iterator over repetition `number`, after its first `start` items."""

    def __next__(self) -> Any:
        while True:
            try:
                item = self._pull()
            except StopIteration:
                self._items, self._pull = None, nothing
                if self._ended or self._is_over():
                    raise
            except Exception as error:
                self._given += takes_a_place(error)
                raise
            else:
                self._gave = True
                self._given += 1
                return item
            self._begin()

    def _begin(self) -> None:
        number, since = self._begun, self._given if self._since is None else self._since
        self._begun, self._since = number + 1, None
        self._gave = self._given > since
        self._mark(since, number)
        self._items = self._open(number, self._given - since)
        self._pull = self._items.__next__

    def close(self) -> None:
        """Give up the rest, and close this repetition. Idempotent."""
        items, self._items, self._pull = self._items, None, nothing
        self._ended = True
        close(items)
