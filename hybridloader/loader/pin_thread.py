"""Results of a loader's stage, pinned or copied to a device before the loop asks for them.

    sampler --> your thread --> [ stage ] --> pinning thread --> queue --> your thread

The pinning thread pulls the stage, pins or copies the batches, and puts them into a queue that is
bounded in batches and in bytes. The consumer's thread counts batches when it takes them from the queue.
It also asks the sampler for one index for each result that it takes, as torch does. So the sampler's
draws don't depend on the pinning thread.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple

from hybridloader._support.user_objects import ENDS, Raised, add_note, is_ours, no_answer
from hybridloader.devices.pinning import Pinner, Sent
from hybridloader.engine.dataset_state import Change
from hybridloader.engine.feed import Feed, Relay
from hybridloader.engine.messages import Last
from hybridloader.engine.stage import Stage
from hybridloader.errors import IteratorClosed, NotReady, WorkerTimeout
from hybridloader.loader.record import LoaderObservation
from hybridloader.observe.measures import TimedPulls
from hybridloader.running.runner import Runner


class _QueuedResult(NamedTuple):
    """Result or error of the stage on its way to the consumer, with the stage's report on it."""

    seq: int
    worker: int
    position: int
    extras: dict[str, Any] | None = None
    found: Any = None
    size: int = 0
    error: Raised | None = None
    final: bool = False


class IndexFeed(Feed):
    """Feed of a stage with indices that the consumer's thread draws.

    It refers to no sampler: a thread keeps the stage alive, and a sampler may refer to the loader.
    """

    def __init__(self) -> None:
        # All the mutable state; filled by one thread and emptied by another:
        self._indices: deque[Any] = deque()
        self._ended = False
        self._error: Raised | None = None
        self._wake: Callable[[], None] | None = None

    def draw_from(self, source: Iterator[Any] | None) -> Iterator[Any] | None:
        """Add an index of `source`, or its end; return `source`, or None after its end."""
        if source is None:
            return None
        try:
            self._indices.append(next(source))
        except Exception as error:
            if not isinstance(error, StopIteration):
                self._error = Raised(error)
            self._ended, source = True, None
        self._notify()
        return source

    def draw(self, most: int | None) -> Any:
        if self._indices:
            return self._indices.popleft()
        if self._ended and not self._indices:
            error, self._error = self._error, None
            if error is not None:
                error.throw()
            raise StopIteration
        raise no_answer(NotReady("the sampler is read when a batch is taken"))

    def ended_by(self, error: Exception) -> bool:
        return True  # as in torch, a sampler that has raised is not asked again

    def when_ready(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        if self._indices or self._ended:  # added in the meantime
            self._notify()

    def _notify(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()


class _PinningIterator(Iterator[Any]):
    """Iterator of the pinning thread: pulls the results of an epoch and pins them.

    Errors count batches from `first`; `pulls` measures the waits for the stage.
    """

    def __init__(
        self, stage: Stage, pinner: Pinner, first: int, pulls: TimedPulls | None = None
    ) -> None:
        self._stage, self._pinner, self._epoch = stage, pinner, stage.epoch
        self._pull = stage.pull if pulls is None else pulls.timed(stage.pull)
        # All the mutable state:
        self._number = first - 1
        self._over = False

    def __next__(self) -> _QueuedResult:
        if self._over:
            raise StopIteration
        stage = self._stage
        self._number += 1
        try:
            result = [self._pull(self._epoch, wait=True)]
        except StopIteration:
            raise
        except Exception as error:
            self._over = stage.closed or is_ours(error, ENDS)
            return _QueuedResult(*self._place, error=Raised(error), final=self._over)
        try:
            extras = stage.last.extras
            if extras is not None and "outcome" in extras and extras["outcome"].short is not None:
                # Samples that still have to be collated into a batch.
                return _QueuedResult(*self._place, extras, result.pop())
            sent = self._pinner.send(result)
            return _QueuedResult(*self._place, extras, sent, sent.size)
        except Exception as error:
            add_note(
                error,
                f"In stage {self._pinner.stage!r} of the loader, at batch {self._number} of this epoch.",
            )
            return _QueuedResult(*self._place, error=Raised(error))

    @property
    def _place(self) -> tuple[int, int, int]:
        last = self._stage.last
        return last.seq, last.worker, last.position


class PinnedResults(Iterator[Any]):
    """Results of one epoch, for the consumer's thread; it takes the place of the stage.

    `source` provides the indices of the stage's `feed`; None if the stage draws them itself.
    """

    def __init__(
        self,
        thread: PinThread,
        stage: Stage,
        relay: Relay,
        feed: IndexFeed,
        source: Iterator[Any] | None,
        timeout: float,
    ) -> None:
        self._thread, self._stage, self._relay, self._timeout = thread, stage, relay, timeout
        self._feed, self._pinner, self._epoch = feed, thread.pinner, stage.epoch
        # All the mutable state:
        self.last = Last()
        self._source = source
        self._failed = False  # by an error that ends the results

    def __next__(self) -> Any:
        if os.getpid() != self._thread.owner:
            raise no_answer(
                IteratorClosed(
                    "this iterator belongs to the parent of this forked process; make a new one here"
                )
            )
        queued = self._wait()
        last = self.last
        before = last.seq
        last.seq, last.worker, last.position, last.extras = queued[:4]
        try:
            self._source = self._feed.draw_from(self._source)
            if queued.error is not None:
                self._failed = queued.final
                queued.error.throw()
            found = queued.found
            return self._pinner.take(found) if type(found) is Sent else found
        except Exception:
            raise
        except BaseException:
            last.seq = before  # the result was not returned
            with suppress(KeyboardInterrupt):  # a second interrupt; the finalizer ends the rest
                self._thread.close()
            raise

    def _wait(self) -> _QueuedResult:
        try:
            queued: _QueuedResult = self._relay.get(self._timeout or None)
            return queued
        except NotReady:
            raise no_answer(WorkerTimeout(self._stage.lateness(self._timeout))) from None
        except StopIteration:
            if not self._failed:
                raise
        except IteratorClosed:
            pass
        except BaseException:  # the thread died, or an interrupt may have lost a batch
            with suppress(KeyboardInterrupt):
                self._thread.close()
            raise
        self._stage.pull(self._epoch, wait=True)  # raises the reason
        raise no_answer(IteratorClosed("this epoch was ended early"))


class PinThread(Runner):
    """Pinning threads of one loader iterator: one thread per epoch, and never two that pull at once.

    The consumer waits `timeout` seconds for one result; 0 waits forever.
    """

    def __init__(self, pinner: Pinner, timeout: float) -> None:
        super().__init__()
        self.pinner, self._timeout = pinner, timeout
        # All the mutable state:
        self._stage: Stage | None = None
        self._relay: Relay | None = None

    def begin(
        self,
        stage: Stage,
        source: Iterator[Any],
        shared_seed: int | None,
        changes: tuple[Change, ...],
        epoch: int,
        *,
        window: int,
        first: int,
        observation: LoaderObservation | None = None,
    ) -> PinnedResults:
        """Begin an epoch with batches numbered from `first`; `break_off` must have ended the last one.

        `window` indices of `source` are drawn in advance. If it is 0, the stage draws the indices, on
        the pinning thread.
        """
        feed, pinner = IndexFeed(), self.pinner
        left: Iterator[Any] | None = source if window else None
        for _ in range(window):
            left = feed.draw_from(left)
        stage.begin(feed if window else source, shared_seed, changes, epoch)
        pulls = None if observation is None else TimedPulls()
        self._stage = stage
        self._relay = Relay(
            _PinningIterator(stage, pinner, first, pulls),
            f"hybridloader-{pinner.stage}",
            depth=pinner.batches_ahead,
            weigh=attrgetter("size"),
            limit=pinner.buffer_bytes,
            prepare=pinner.prepare,
            start=False,
        )
        if observation is not None and pulls is not None:
            observation.pinned(pinner.stage, self._relay.queue, pulls)
        self._relay.start()
        return PinnedResults(self, stage, self._relay, feed, left, self._timeout)

    @property
    def running_stages(self) -> list[Stage]:
        return [] if self._stage is None else [self._stage]

    @property
    def running_relays(self) -> list[Relay]:
        return [] if self._relay is None else [self._relay]

    @property
    def empty(self) -> bool:
        """True if no batch or error waits in the queue."""
        return self._relay is None or not self._relay.queue.items
