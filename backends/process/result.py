"""A result as it came from a worker process: unopened, and to be opened, dropped or sent on.

It knows where its parts lie and holds the slots that it names. It never loads anything before it is
asked to, because most results of a stage that feeds another are never loaded here at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hybridloader.backends.process.codec import open_packed
from hybridloader.engine.payload import Payload
from hybridloader.memory import shared_slots
from hybridloader.memory.packing import unpack

_NOTHING = memoryview(b"")


class SlotReference:
    """One batch's claim on one slot, shared by the parent and the workers that it was sent on to.

    The worker that filled the slot hears of it once, when the last of them is done.
    """

    __slots__ = ("_holders", "_number", "_reader")

    def __init__(self, reader: shared_slots.SlotReader, number: int) -> None:
        self._reader, self._number = reader, number
        self._holders = 1  # the parent

    def add(self) -> None:
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            self._reader.hand_back(self._number)


class ProcessResult(Payload):
    """A batch that came from a process, none of it through slots.

    Attributes
    ----------
    header
        Its pickle; empty if that is the last of the buffers.
    buffers
        Those that came through the stream.
    count
        How many items it is, if the worker's value was a list; else None.
    nbytes
        Of the header and all buffers, wherever they lie; 0 once they were let go.
    forks
        The worker is a fork of this process.
    forwardable
        It can be the index of a `Task` for another crew of processes.
    """

    __slots__ = ("_state", "buffers", "count", "forks", "header")

    forwardable = True

    def __init__(
        self, header: memoryview, buffers: list[memoryview], count: int | None, forks: bool
    ) -> None:
        self.header, self.buffers, self.count, self.forks = header, buffers, count, forks
        self._state = ""

    @property
    def nbytes(self) -> int:
        slotted = sum(0 if span is None else span.size for span in self.spans())
        return len(self.header) + sum(buffer.nbytes for buffer in self.buffers) + slotted

    def open(self) -> Any:
        if self._state:
            self._refuse("opened")
        self._state = "opened"
        return unpack(self.header, self.buffers)

    def discard(self) -> None:
        if not self._state:
            self._state = "discarded"
            self._let_go()
        else:
            self.answered()

    # -- sending on ----------------------------------------------------------------------------------

    def holds(self) -> dict[int, SlotReference]:
        """Its claims by slot, for a worker that it is sent to. Again and again until it is answered."""
        if not self._state:
            self._state = "sent on"
        elif self._state != "sent on":
            self._refuse("sent on")
        return {}

    def answered(self) -> None:
        """What it was sent for is done: it will not be sent again."""
        if self._state == "sent on":
            self._state = "sent on and answered"
            self._let_go()

    def spans(self) -> tuple[shared_slots.Span | None, ...]:
        """Where each buffer lies; None for one that came through the stream."""
        return (None,) * len(self.buffers)

    def buffers_in_place(self) -> list[memoryview]:
        """All buffers, where they lie: good for as long as somebody has its `holds`."""
        return list(self.buffers)

    def pickled(self) -> memoryview:
        """The header, wherever it lies."""
        return self.header or self.buffers_in_place()[-1]

    def peek(self) -> Any:
        """The value, over memory that is good for as long as somebody has its `holds`."""
        buffers = self.buffers_in_place()
        return unpack(self.header or buffers.pop(), buffers)

    # -- the parts -----------------------------------------------------------------------------------

    def _refuse(self, what: str) -> None:
        raise RuntimeError(
            f"a result that was {self._state} already can't be {what}: each is opened, discarded or "
            "sent on to one stage. Open it and send the value, if several are to have it."
        )

    def _let_go(self) -> None:
        """Of the memory; what it was stays known."""
        self.header, self.buffers = _NOTHING, []


class SlottedResult(ProcessResult):
    """A batch of which something lies in slots; `slot_map` tells where."""

    __slots__ = ("_holds", "slot_map", "slots")

    def __init__(
        self,
        header: memoryview,
        buffers: list[memoryview],
        count: int | None,
        forks: bool,
        slots: shared_slots.SlotReader,
        slot_map: shared_slots.SlotMap,
    ) -> None:
        super().__init__(header, buffers, count, forks)
        self.slots = slots
        self.slot_map: shared_slots.SlotMap | None = slot_map
        self._holds: dict[int, SlotReference] = {}  # by slot, once it was sent on

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Discard a result that nobody took, as in a queue that was closed.

        At Python's own end all memory goes back by itself, and modules may be empty already: nothing
        that `discard` needs is there, hence the function as a default.
        """
        if not ending() and getattr(self, "_holds", None) is not None and not self._state:
            self.discard()

    def open(self) -> Any:
        if self._state:
            self._refuse("opened")
        self._state = "opened"
        return open_packed(self.header, self.buffers, self.slots, self.slot_map)

    def discard(self) -> None:
        if not self._state and self.slot_map is not None:
            self.slots.give_back(self.slot_map)
        super().discard()

    def holds(self) -> dict[int, SlotReference]:
        if not self._state and self.slot_map is not None:
            self.slots.forwards = True
            self._holds = {
                n: SlotReference(self.slots, n) for n in shared_slots.slots_of(self.slot_map)
            }
        super().holds()
        return self._holds

    def answered(self) -> None:
        if self._state == "sent on":
            for hold in self._holds.values():
                hold.release()
        super().answered()

    def spans(self) -> tuple[shared_slots.Span | None, ...]:
        return () if self.slot_map is None else self.slot_map.spans

    def buffers_in_place(self) -> list[memoryview]:
        stream, view = iter(self.buffers), self.slots.view
        return [next(stream) if span is None else view(span) for span in self.spans()]

    def _let_go(self) -> None:
        super()._let_go()
        self.slot_map = None
