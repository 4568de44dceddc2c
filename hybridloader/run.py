"""A pipeline that runs: the iterator that your loop pulls."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hybridloader.errors import IteratorClosed
from hybridloader.machine import Machine
from hybridloader.relay import FINAL
from hybridloader.statistics import PipelineStats, collect

if TYPE_CHECKING:
    from hybridloader.pipeline import Pipeline


_CLOSED = IteratorClosed("closed")
"""Why a run is over that somebody closed."""


class Run(Iterator[Any]):
    """One pass over a pipeline: an iterator, and a context manager that ends it.

    Closing it, exhausting it or letting it go ends all workers and threads. What a function raises
    comes out in the place of its item; asking again goes on behind it. One thread asks at a time;
    `close` may be called from any.
    """

    def __init__(self, machine: Machine, epoch: int, epochs: Epochs | None = None) -> None:
        self._machine = machine
        self._epochs = epochs  # whose workers these are; none: its own
        self.epoch = epoch
        # All the mutable state:
        self._asking = threading.RLock()
        self._over: BaseException | None = None
        self._finalizer = weakref.finalize(self, machine.close) if epochs is None else None
        try:
            self._items: Iterator[Any] = machine.begin(epoch)
        except BaseException:
            machine.close()
            raise
        self._left = machine.left

    def __next__(self) -> Any:
        return self._ask(self._items.__next__)

    def next_nowait(self) -> Any:
        """The next item if it is there.

        Where nothing runs besides the caller, the caller makes it now.

        Raises
        ------
        NotReady
            There is none yet.
        """
        return self._ask(getattr(self._items, "next_nowait", self._items.__next__))

    def _ask(self, get: Any) -> Any:
        with self._asking:
            machine = self._machine
            if self._over is not None or self._left.up or os.getpid() != machine.owner:
                self._refuse()
            began = time.monotonic()
            try:
                item = get()
            except StopIteration as end:
                self._end(end)
                raise
            except FINAL as error:
                self._end(error)
                raise
            finally:
                machine.waited += time.monotonic() - began
            machine.given += 1
            return item

    def _end(self, why: BaseException) -> None:
        # Not the error itself: its traceback holds this object.
        self._over = why if isinstance(why, StopIteration) else type(why)(*why.args)
        if self._epochs is None:
            self.close()

    def _refuse(self) -> None:
        if isinstance(self._over, StopIteration):
            raise StopIteration
        if os.getpid() != self._machine.owner:
            raise IteratorClosed(
                "this iterator belongs to the process that this one was forked from; make one here"
            )
        if isinstance(self._over, FINAL) and self._over is not _CLOSED:
            raise IteratorClosed("the pipeline was ended by the error before") from self._over
        raise IteratorClosed(
            "this iterator is closed" if self._over is _CLOSED else "a later epoch has begun"
        )

    def close(self) -> None:
        """End all workers and threads: any number of times, from any thread; within some 2 seconds."""
        if self._over is None:
            self._over = _CLOSED
        if self._finalizer is not None:
            self._finalizer()
        elif not self._left.up:
            self._machine.break_off()

    @property
    def closed(self) -> bool:
        """Whether nothing will come any more."""
        return self._over is not None or self._left.up

    def stats(self) -> PipelineStats:
        """What every stage has done and waited for until now, and which one holds up the others."""
        return collect(self._machine)

    def __enter__(self) -> Run:
        if self.closed and not isinstance(self._over, StopIteration):
            self._refuse()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Epochs(Iterator[Run]):
    """Several passes over a pipeline, one after the other, on the same workers.

    An iterator of `Run`s, and a context manager. Beginning the next pass breaks the last one off.
    """

    def __init__(self, pipeline: Pipeline, count: int | None, seed: int | None, first: int) -> None:
        self._machine = Machine(pipeline, seed)
        self._finalizer = weakref.finalize(self, self._machine.close)
        self._left, self._next = count, first

    def __next__(self) -> Run:
        if self._machine.closed.up:
            raise IteratorClosed("these epochs are closed")
        if self._left is not None:
            if self._left == 0:
                self.close()
                raise StopIteration
            self._left -= 1
        epoch, self._next = self._next, self._next + 1
        return Run(self._machine, epoch, self)

    def close(self) -> None:
        """End all workers and threads."""
        self._finalizer()

    def __enter__(self) -> Epochs:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
