"""The results of a loader's stage, pinned, or on a device, before they are asked for.

    sampler --> your thread --> [ stage ] --> the pinning thread --> queue --> your thread

The pinning thread pulls the stage and handles what comes, into a queue that is bounded in batches and
in bytes. All that is counted is counted on the thread of whoever takes a batch, when it is taken: what
waits in the queue was not yet given to anybody. There, too, the sampler is asked for one index for each
result that is taken, as torch does it; so what a sampler draws depends on no thread of ours.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from hybridloader._support.errors import IteratorClosed, NotReady, Raised, WorkerTimeout, add_note
from hybridloader.devices.pinning import Pinner, Sent
from hybridloader.engine.messages import Last
from hybridloader.engine.refresh import Change
from hybridloader.engine.relay import FINAL, Relay
from hybridloader.engine.stage import Stage

_PATIENCE = 2.0
"""Seconds that `close` may take."""


class _Handed(NamedTuple):
    """What came from the stage, or the error in its place, and what the stage said of it."""

    seq: int
    worker: int
    position: int
    extras: dict[str, Any] | None
    found: Any
    size: int = 0
    error: Raised | None = None
    final: bool = False


class Drawn:
    """The feed of a stage: indices that were drawn on another thread.

    Holds no sampler: the stage is held by a thread, and a sampler may hold the loader.
    """

    final: tuple[type[Exception], ...] = (Exception,)

    def __init__(self) -> None:
        # All the mutable state; filled from one thread and emptied by another:
        self._indices: deque[Any] = deque()
        self._ended = False
        self._error: Raised | None = None
        self._wake: Callable[[], None] | None = None

    def give(self, index: Any) -> None:
        """Another index."""
        self._indices.append(index)
        self._tell()

    def end(self, error: Exception | None) -> None:
        """There are no more; because the sampler has raised `error`, if there is one."""
        self._error, self._ended = None if error is None else Raised(error), True
        self._tell()

    def draw(self, most: int | None) -> Any:
        if self._indices:
            return self._indices.popleft()
        if self._ended and not self._indices:
            error, self._error = self._error, None
            if error is not None:
                error.throw()
            raise StopIteration
        raise NotReady("the sampler is asked when a batch is taken")

    def when_ready(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        if self._indices or self._ended:  # it came meanwhile
            self._tell()

    def take_apart(self, index: Any) -> bool:
        return False

    def _tell(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()


class _Pulling(Iterator[Any]):
    """What the thread runs: the results of one pass, handled one after the other.

    Parameters
    ----------
    first
        The number of the first batch, for errors.
    """

    def __init__(self, stage: Stage, pinner: Pinner, first: int) -> None:
        self._stage, self._pinner, self._epoch = stage, pinner, stage.epoch
        # All the mutable state:
        self._number = first - 1
        self._over = False
        self.ends_stage = False

    def __next__(self) -> _Handed:
        if self._over:
            raise StopIteration
        stage = self._stage
        try:
            result = [stage.pull(self._epoch, wait=True)]
        except StopIteration:
            raise
        except Exception as error:
            self._over = stage.closed or isinstance(error, FINAL)
            self._number += 1
            return self._handed(None, error=Raised(error), final=self._over)
        self._number += 1
        try:
            return self._handled(result)
        except Exception as error:
            add_note(
                error,
                f"In stage {self._pinner.stage!r} of the loader, at batch {self._number} of this pass.",
            )
            return self._handed(None, error=Raised(error))

    def _handled(self, result: list[Any]) -> _Handed:
        extras = self._stage.last.extras
        if extras is not None and "outcome" in extras and extras["outcome"].short is not None:
            return self._handed(result.pop())  # samples, of which a batch is yet to be made
        sent = self._pinner.send(result)
        return self._handed(sent, sent.size)

    def _handed(
        self, found: Any, size: int = 0, error: Raised | None = None, final: bool = False
    ) -> _Handed:
        last = self._stage.last
        extras = last.extras if error is None else None
        return _Handed(last.seq, last.worker, last.position, extras, found, size, error, final)

    def close(self) -> None:
        """The thread ends."""
        if self.ends_stage:
            self._stage.close()


class PinnedResults(Iterator[Any]):
    """The results of one pass of a stage; to whoever takes them it looks like the stage.

    Parameters
    ----------
    source
        The indices, if they are to be drawn here; None: the stage has a source of its own.
    timeout
        Seconds to wait for one result; 0 waits for ever.

    Attributes
    ----------
    last
        As of a `Stage`.
    """

    def __init__(
        self,
        thread: PinThread,
        stage: Stage,
        source: Iterator[Any] | None,
        drawn: Drawn,
        timeout: float,
    ) -> None:
        self._thread, self._stage, self._timeout = thread, stage, timeout
        self._source, self._drawn = source, drawn
        self._pinner = thread.pinner
        self._owner = os.getpid()
        # All the mutable state:
        self.last = Last()
        self._relay: Relay | None = None
        self._epoch = -1
        self._failed = False  # by an error after which nothing more will come

    def draw(self) -> None:
        """Ask the sampler for one index more."""
        if self._source is None:
            return
        try:
            index = next(self._source)
        except StopIteration:
            self._source = None
            self._drawn.end(None)
            return
        except Exception as error:
            self._source = None
            self._drawn.end(error)
            return
        self._drawn.give(index)

    def start(self, relay: Relay) -> None:
        """The stage has begun: what comes of it, comes through `relay`."""
        self._epoch, self._relay = self._stage.epoch, relay
        relay.start()

    def __next__(self) -> Any:
        if os.getpid() != self._owner:
            raise IteratorClosed(
                "this iterator belongs to the process that this one was forked from; make one here"
            )
        handed = self._wait()
        last = self.last
        last.seq, last.worker, last.position, last.extras = handed[:4]
        self.draw()
        if handed.error is not None:
            self._failed = handed.final
            handed.error.throw()
        found = handed.found
        return self._pinner.take(found) if type(found) is Sent else found

    def _wait(self) -> _Handed:
        assert self._relay is not None
        try:
            handed: _Handed = self._relay.get(self._timeout or None)
            return handed
        except NotReady:
            raise WorkerTimeout(self._stage.lateness(self._timeout)) from None
        except StopIteration:
            if not self._failed:
                raise
        except IteratorClosed:
            pass
        except BaseException:  # the thread has died of it; or an interrupt may have taken a batch
            self._thread.close()
            raise
        self._stage.pull(self._epoch, wait=True)  # it says why there is no more
        raise IteratorClosed("this pass was broken off")


class PinThread:
    """The pinning thread of one loader iterator: one for each pass, never two that pull.

    Parameters
    ----------
    pinner
        Handles the batches.
    timeout
        Seconds to wait for one result; 0 waits for ever.
    """

    def __init__(self, pinner: Pinner, timeout: float) -> None:
        self.pinner, self._timeout = pinner, timeout
        self._owner = os.getpid()
        # All the mutable state:
        self._stage: Stage | None = None
        self._relay: Relay | None = None
        self._pulling: _Pulling | None = None

    def begin(
        self,
        stage: Stage,
        source: Iterator[Any],
        shared_seed: int | None,
        changes: tuple[Change, ...],
        *,
        window: int,
        first: int,
    ) -> PinnedResults:
        """Begin a pass, behind `break_off` if there was one before.

        Parameters
        ----------
        source
            Indices.
        window
            How many of them to draw in advance; 0: the stage draws them itself, on the thread.
        first
            The number of the first batch.
        """
        drawn = Drawn()
        results = PinnedResults(self, stage, source if window else None, drawn, self._timeout)
        for _ in range(window):
            results.draw()
        stage.begin(drawn if window else source, shared_seed, changes)
        pinner = self.pinner
        self._stage, self._pulling = stage, _Pulling(stage, pinner, first)
        self._relay = Relay(
            self._pulling,
            f"hybridloader-{pinner.stage}",
            depth=pinner.prefetch,
            weigh=attrgetter("size"),
            limit=pinner.buffer_bytes,
            prepare=pinner.prepare,
            start=False,
        )
        results.start(self._relay)
        return results

    def break_off(self) -> None:
        """End the pass that runs, and its thread; the workers stay."""
        if self._relay is not None and self._stage is not None and os.getpid() == self._owner:
            self._relay.shut()
            self._stage.interrupt()
            self._relay.close()

    def close(self) -> None:
        """End thread and stage: from any thread, any number of times; within some 2 seconds."""
        if os.getpid() != self._owner:
            return
        stage, relay, pulling = self._stage, self._relay, self._pulling
        if stage is None or relay is None or pulling is None:
            return
        deadline = time.monotonic() + _PATIENCE
        relay.shut()
        if relay.here:  # a garbage collection has ended the iterator just there, within the stage
            pulling.ends_stage = True
            stage.interrupt()
            return
        stage.close()
        relay.close(deadline)
