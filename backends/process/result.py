"""Results of worker processes, not yet opened: each is opened, discarded, or forwarded to a worker.

A result knows where its parts lie, and keeps the slots that it names in use. It loads nothing before
it is asked to, because most results of a stage that feeds another are never loaded in the parent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hybridloader.backends.process.codec import open_packed
from hybridloader.engine.payload import Payload
from hybridloader.memory.packing import unpack
from hybridloader.memory.shared_slots import BufferPlace, SlotMap, SlotReader, slots_of

_NOTHING = memoryview(b"")


class SlotReference:
    """Use of one slot by one result, shared by the parent and the workers that it is forwarded to.

    When the last of them is done, the worker that filled the slot is notified once.
    """

    __slots__ = ("_number", "_reader", "_users")

    def __init__(self, reader: SlotReader, number: int) -> None:
        self._reader, self._number = reader, number
        self._users = 1  # the parent

    def retain(self) -> None:
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._reader.hand_back(self._number)


class ProcessResult(Payload):
    """Result of a worker process, none of it in slots unless `slots` and `slot_map` are given."""

    __slots__ = (
        "_references", "_state", "buffers", "count", "forks", "header", "slot_map", "slots"
    )  # fmt: skip

    forwardable = True  # usable as the index of a `Task` for another crew of processes

    def __init__(
        self,
        header: memoryview,  # the pickle; empty if it is the last of the buffers
        buffers: list[memoryview],  # buffers from the stream
        count: int | None,  # number of items, if the worker's value was a list
        forks: bool,  # the worker is a fork of this process
        slots: SlotReader | None = None,  # slots of the worker
        slot_map: SlotMap | None = None,  # places of the other buffers in the slots
    ) -> None:
        self.header, self.buffers, self.count, self.forks = header, buffers, count, forks
        self.slots, self.slot_map = slots, slot_map
        self._references: dict[int, SlotReference] = {}  # by slot, once it is forwarded
        self._state = ""

    @property
    def nbytes(self) -> int:  # of the header and all buffers, in any memory; 0 once freed
        return len(self.header) + sum(self._sizes)

    @property
    def array_bytes(self) -> int:
        return sum(self._sizes if self.header else self._sizes[:-1])

    @property
    def _sizes(self) -> list[int]:  # of the buffers
        stream = iter(self.buffers)
        return [next(stream).nbytes if span is None else span.size for span in self.spans()]

    def open(self) -> Any:
        if self._state:
            self._refuse("opened")
        self._state = "opened"
        if self.slot_map is None:
            return unpack(self.header, self.buffers)
        return open_packed(self.header, self.buffers, self.slots, self.slot_map)

    def discard(self) -> None:
        if self._state:
            self.answered()
            return
        if self.slots is not None and self.slot_map is not None:
            self.slots.give_back(self.slot_map)
        self._state = "discarded"
        self._let_go()

    # -- forwarding ----------------------------------------------------------------------------------

    def references(self) -> dict[int, SlotReference]:
        """References by slot, for a worker that it is forwarded to: any number, until it is answered."""
        if not self._state:
            self._state = "forwarded"
            if self.slots is not None and self.slot_map is not None:
                self.slots.forwards = True
                numbers = slots_of(self.slot_map)
                self._references = {n: SlotReference(self.slots, n) for n in numbers}
        elif self._state != "forwarded":
            self._refuse("forwarded")
        return self._references

    def answered(self) -> None:
        """Let go of it: the task that it was forwarded as is done, and will not be sent again."""
        if self._state == "forwarded":
            self._state = "forwarded and answered"
            for reference in self._references.values():
                reference.release()
            self._let_go()

    def spans(self) -> tuple[BufferPlace | None, ...]:
        """Place of each buffer; None for a buffer that came through the stream."""
        return (None,) * len(self.buffers) if self.slot_map is None else self.slot_map.spans

    def buffers_in_place(self) -> list[memoryview]:
        """Give all buffers, where they lie: valid for as long as somebody has its `references`."""
        if self.slots is None:
            return list(self.buffers)
        stream, view = iter(self.buffers), self.slots.view
        return [next(stream) if span is None else view(span) for span in self.spans()]

    def pickled(self) -> memoryview:  # the header, in any memory
        return self.header or self.buffers_in_place()[-1]

    def peek(self) -> Any:
        """Load the value, over memory that is valid for as long as somebody has its `references`."""
        buffers = self.buffers_in_place()
        return unpack(self.header or buffers.pop(), buffers)

    # -- the parts -----------------------------------------------------------------------------------

    def _refuse(self, what: str) -> None:
        raise RuntimeError(
            f"a result that was already {self._state} can't be {what}: each is opened, discarded or "
            "forwarded to one stage. To use it more than once, open it and send the value."
        )

    def _let_go(self) -> None:
        """Drop the memory; the state stays, for errors."""
        self.header, self.buffers, self.slot_map = _NOTHING, [], None


class SlottedResult(ProcessResult):
    """Result with data in slots, which are returned even if the result is never taken."""

    __slots__ = ()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Discard a result that was never taken, for instance in a closed queue.

        At Python's own end all memory goes back by itself, and modules may be empty already: nothing
        that `discard` needs is there, hence the function as a default.
        """
        if not ending() and getattr(self, "_state", None) == "":
            self.discard()
