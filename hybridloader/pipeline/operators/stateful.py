"""Sources with a state: samplers and iterables that know their position.

They have torchdata's protocol, `state_dict` and `load_state_dict`, on the object or on its iterator.
Their state is taken now and then, before it is known whether anybody will want it: a pipeline reads
ahead, so when its state is asked for, the source is far beyond. Nothing is read here for its state.
"""

from __future__ import annotations

import base64
import copy
import sys
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any

from hybridloader._support.attributes import attribute, has
from hybridloader._support.cadence import Cadence
from hybridloader._support.error_handling import no_answer, text_of
from hybridloader._support.state_copies import copied, is_stateful
from hybridloader.engine.loaded_states import load_for_epoch, undo_load
from hybridloader.errors import ShardLost, StateError
from hybridloader.fetching.on_error.places import rest_is_lost
from hybridloader.running.operator import Context, Mark, OperatorIterator

INDICES = 1024
"""Indices from one mark of a sampler to the next: an index takes 0.1 us, a state 10."""

ITEMS = 64
"""Items from one mark of an iterable to the next: up to as many are read again for nothing."""


class Opened:
    """Iteration over an iterable, begun after the `at` items before the position of a state.

    The iterable has got the number of the epoch; a `drawn` one has a generator made for it.
    """

    def __init__(self, iterable: Any, context: Context, name: str, *, drawn: bool = False) -> None:
        mark = context.saved
        undo_load(iterable)
        self._generator = None if drawn else _generator_of(iterable)
        self.at = 0
        if self._generator is not None and mark is not None and isinstance(mark.value, str):
            self._set(self._generator, mark.value, name)
            mark = None
        self.iterator: Iterator[Any] = iter(iterable)
        self._stateful: Any = None
        self._computes = False  # its state after any number of items, at any time
        if is_stateful(self.iterator):  # as in torchdata, this comes first
            self._stateful = self.iterator
            if mark is not None:
                self._load(mark, name)
        elif is_stateful(iterable):
            self._stateful = iterable
            if mark is not None and mark.value is None:  # after the last item
                self.at, self.iterator, self._stateful = mark.at, iter(()), None
            elif mark is not None:
                self._load(mark, name)
                self.iterator = iter(iterable)
                if has(iterable, "state_after") and iterable.epoch != mark.value["epoch"]:
                    self.iterator = iter(())  # it was the end, for this number of ranks
            self._computes = has(self._stateful, "state_after")

    def _load(self, mark: Mark, name: str) -> None:
        try:
            load_for_epoch(self._stateful, copied(mark.value), name)
        except Exception as error:
            raise no_answer(
                StateError(
                    f"{name}: {type(self._stateful).__qualname__}.load_state_dict() refused the "
                    f"state that was saved after item {mark.at}: {text_of(error)}"
                )
            ) from error
        self.at = mark.at

    @staticmethod
    def _set(generator: Any, value: Any, name: str) -> None:
        import torch

        try:
            state = torch.frombuffer(bytearray(base64.b64decode(value)), dtype=torch.uint8)
            generator.set_state(state)
        except Exception as error:
            raise no_answer(
                StateError(f"{name}: the state of the generator is damaged: {error}")
            ) from error

    def items(self, context: Context, every: int) -> OperatorIterator:
        """Return the rest of the epoch, marked every so many items."""
        if self._computes:
            stateful, at, begun = self._stateful, self.at, copied(self._stateful.state_dict())
            context.mark_all(lambda n: stateful.state_after(begun, n - at))
            return OperatorIterator(self.iterator)
        if self._stateful is not None:
            loaded = context.saved is not None and not self.at
            again = self._begun_again if loaded else None
            return MarkedIterator(self.iterator, self.at, self._stateful, context, every, again)
        if self._generator is not None:  # all of the order follows from how it is now
            context.mark(0, _generator_state(self._generator))
        if isinstance(self.iterator, GeneratorType):
            return GeneratorIterator(self.iterator)
        return OperatorIterator(self.iterator)

    def _begun_again(self) -> Iterator[Any]:
        """Return the iterator of the epoch, if the state before it was the end of the one before."""
        undo_load(self._stateful, ended=True)
        return iter(self._stateful)


def generator_state(order: Any) -> str | None:
    """Return the state of the generator from which the next epoch of `order` draws; None without."""
    generator = _generator_of(order)
    return None if generator is None else _generator_state(generator)


def _generator_state(generator: Any) -> str:
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode()


def _generator_of(order: Any) -> Any:
    """Return torch's generator in one of its samplers, also in its `BatchSampler`."""
    for sampler in (order, attribute(order, "sampler")):
        generator = attribute(sampler, "generator")
        if has(generator, "get_state") and has(generator, "initial_seed"):
            return generator
    return None


def draws_a_seed(order: Any) -> bool:
    """Return True if it is torch's `RandomSampler` without a generator, maybe in torch's `BatchSampler`.

    Others that use torch's default generator can't be distinguished from those that use none.
    """
    if "torch" not in sys.modules:
        return False
    from torch.utils.data import BatchSampler, RandomSampler

    sampler = order.sampler if type(order) is BatchSampler else order
    return type(sampler) is RandomSampler and sampler.generator is None


def with_drawn_seed(order: Any, context: Context) -> Any:
    """Return `order`, or a copy of it that has the seed that it would draw."""
    if not draws_a_seed(order):
        return order
    from torch import Generator

    order = copy.copy(order)
    if has(order, "sampler"):
        order.sampler = copy.copy(order.sampler)
    sampler = attribute(order, "sampler", order)
    sampler.generator = Generator().manual_seed(context.draw())
    return order


class GeneratorIterator(OperatorIterator):
    """Iterator over a generator. An error ends it, which must not look like the end of the source."""

    def __init__(self, items: Iterator[Any]) -> None:
        super().__init__(items)
        # All the mutable state:
        self._lost: ShardLost | None = None

    def __next__(self) -> Any:
        if self._lost is not None:
            lost, self._lost = self._lost, None
            raise lost
        try:
            return self._pull()
        except Exception as error:
            self._failed(error)
            if not isinstance(error, StopIteration):
                self._lost = rest_is_lost("an item of a source", error)
            raise


class MarkedIterator(OperatorIterator):
    """Iterator that takes a state of `stateful` every `every` items, or less often if that takes long.

    A state after the last item is never used: it may mean the beginning of the next epoch. If no first
    item comes, `again` makes another iterator.
    """

    def __init__(
        self,
        items: Iterator[Any],
        at: int,
        stateful: Any,
        context: Context,
        every: int,
        again: Callable[[], Iterator[Any]] | None = None,
    ) -> None:
        super().__init__(items)
        self._stateful, self._mark, self._every = stateful, context.mark, every
        self._cadence = Cadence()
        # All the other mutable state:
        self._again = again
        self._given = at  # items, also those that raised
        self._cadence.due()
        self._mark(at, self._state())
        self._due = at + every

    def __next__(self) -> Any:
        due, at, state = self._given >= self._due and self._cadence.due(), self._given, None
        if due:
            self._due, state = at + self._every, self._state()
        try:
            item = self._pull()
        except StopIteration:
            again, self._again = self._again, None
            if again is None or self._given:
                self._end()
                raise
            self._items = again()
            self._pull = self._items.__next__
            return next(self)
        except Exception:
            self._given += 1
            raise
        self._given += 1
        if due:
            self._mark(at, state)
        return item

    def _state(self) -> Any:
        """Return the state, or the error: it is raised only if a state is asked for."""
        try:
            return copied(self._stateful.state_dict())
        except Exception as error:
            BaseException.__setattr__(error, "__traceback__", None)
            return error
        finally:
            self._cadence.taken()
