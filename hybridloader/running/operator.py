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
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, Protocol

from hybridloader._support.text import beginning
from hybridloader._support.user_objects import Raised, attribute, close, takes_a_place
from hybridloader.fetching.on_error import Skip, final
from hybridloader.running.placement import Placement as Placement

if TYPE_CHECKING:
    from hybridloader.devices.pinning import Pinner
    from hybridloader.memory.page_locks import PageLocks

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

    __slots__ = ("operators",)

    operators: tuple[Operator, ...]

    @property
    def length(self) -> Length:
        """Number of items of an epoch: an int, ``math.inf``, or None if it can't be known."""
        length: Length = None
        for operator in self.operators:
            length = operator.length(length)
        return length

    def settled(self) -> Chain:
        """Return this chain with workers for the steps that leave them to a measurement."""
        return self


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


class Log(Protocol):
    """Log of an operator, with an entry for each of its items; see `Context.log`."""

    def add(self, entry: Any) -> None:
        """Add the entry of one more item, before it is given; an error counts as one."""


class Context(Protocol):
    """Values and services for an operator in one pass."""

    epoch: int
    """Number of this pass over the whole pipeline, from 0; a repetition counts as a pass."""
    seed: int | None
    """Seed that the user gave to the run; None if it was drawn."""
    run_seed: int
    """Seed of the run, whether given or drawn."""
    shared: dict[Any, Any]
    """Values that the operators of one pass share, by a key of their own."""
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
    locks: PageLocks | None
    """Page locks for memory that this operator makes, if a device is going to read it there."""

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

    def mark_all(self, value_of: Callable[[int], Any]) -> None:
        """Note that this operator could resume after any number of its items.

        ``value_of(n)``, called only when a state is taken, makes the value of the mark after `n` items.
        """

    def log(self, first: Any, value_of: Callable[[int, Any], Any]) -> Log:
        """Return a log for an operator that could resume after each of its items, as `mark` would note.

        Its entries are `first`, and one for each item. ``value_of(n, entry)``, called only when a state
        is taken, makes the value of the mark after `n` items.
        """

    def drop(self, items: Iterator[Any], at: int) -> Iterator[Any]:
        """Return `items`, which are those from number `at` on, from number `start` on."""

    def left_out(self, item: Any, error: Exception) -> None:
        """Note that this operator leaves out `item` because of `error`: for `Run.skipped`."""


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
    many_passes: ClassVar[bool] = False
    """True if it passes over the items before it more than once in a run."""
    joins_by_number: ClassVar[bool] = False
    """True if it joins the items of its `branches` by their numbers."""
    keeps_gaps: ClassVar[bool] = True
    """False if it forgets the places of items that ``on_error="skip"`` left out before it."""
    counted: bool = False
    """True for a source that has the same length in every epoch."""
    marks_inputs: ClassVar[bool] = False
    """True if it calls ``context.mark(n, k)`` wherever its items from number `n` on are made only of the
    items before it from number `k` on, as when nothing is in its buffer. Errors count as items. Instead
    of `k` it may give a list that begins with it."""
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
        """Name in tables and errors."""
        return _words(type(self).__name__)

    @property
    def keeps_count(self) -> bool:
        """True if an error in the place of an item before it takes the place of one of its items."""
        return bool(self.branches()) or (self.seek(1) == 1 and self.seek(2) == 2)

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

    @property
    def tee_place(self) -> tuple[Any, int] | None:
        """The `TeePoint` whose pass it shares, if it shares one, and the number of its branch there."""
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

    @property
    def begins_itself(self) -> bool:
        """True if `begin` is overridden, so that it decides when the steps before are opened."""
        return type(self).begin is not Operator.begin

    def length(self, upstream: Length) -> Length:
        """Return the number of items that come out when `upstream` go in."""
        return None

    def seek(self, n: int) -> int | None:
        """Return the number of items before it that make its first `n` items, n above 0.

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
            return [
                UpstreamPart(None, 0, epoch),
                *(UpstreamPart(k, 0, epoch) for k in range(len(self.branches()))),
            ]
        if self.marks_inputs and mark is not None:
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
        for field in fields(own) if is_dataclass(own) else ():
            value = getattr(self, field.name)
            required = field.default is MISSING and field.default_factory is MISSING
            if not field.repr or (not required and value == field.default):
                continue
            if longest is not None and type(value) in (list, tuple):
                value = value[:longest]  # the rest is not shown, and may be a million numbers
            shown = attribute(value, "__qualname__") or _ADDRESS.sub("", repr(value))
            if " at 0x" in shown:  # an address differs in every run
                shown = type(value).__qualname__
            shown = shown if longest is None else beginning(shown, longest)
            shown_fields.append(shown if required else f"{field.name}={shown}")
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


def _words(name: str) -> str:
    """``PaddedBatch`` -> ``padded_batch``."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def of_length(value: Length) -> str:
    """Describe a length in words."""
    if value is None:
        return "unknown"
    return "endless" if value == INFINITE else f"{int(value):,}"


def steps_in(chain: Chain) -> Iterator[Operator]:
    """Yield the operators of all chains that items come through, each chain once, `chain` last."""
    met: set[int] = set()

    def walk(chain: Chain) -> Iterator[Operator]:
        met.add(id(chain))
        for operator in chain.operators:
            for branch in operator.branches():
                if id(branch) not in met:
                    yield from walk(branch)
        yield from chain.operators

    return walk(chain)


# -- iterators: each has all its mutable state in plain attributes, and never runs a thread ------------


def close_all(iterators: list[Iterator[Any]]) -> None:
    """Close every one of them, also when closing another fails; raises the first failure."""
    first: Raised | None = None
    for iterator in iterators:
        try:
            close(iterator)
        except BaseException as error:
            first = first or Raised(error)
    if first is not None:
        first.throw()


def nothing() -> NoReturn:
    """Raise `StopIteration`: the ``__next__`` of an iterator that has ended."""
    raise StopIteration


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
        """Give up the rest, and close the iterator before. Idempotent."""
        self._end()
        # Called here: one more function would double the nested calls of a long chain.
        shut = getattr(self._items, "close", None) if self.owns else None
        if shut is not None:
            shut()


class JoinIterator(Iterator[Any]):
    """Base of the iterators over several others, which are closed with this."""

    def __init__(self, branches: list[Iterator[Any]]) -> None:
        self._opened = branches

    def close(self) -> None:
        """Close them all. Idempotent."""
        close_all(self._opened)


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
