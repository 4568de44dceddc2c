"""All slots between the parent and one worker, both ways, and what is sent on to it by others.

Results come through slots of the worker's, large tasks go through slots of the parent's, made at the
first large task. A result of one worker (of crew A) may be the task of another (of crew B) without
being opened or copied in the parent. Who counts what then, and who tells whom:

1. A's worker counts one holder for each result over a slot, and writes to the slot when there is
   none. It hears of the end of a holder by the slot's number, which comes with the next message.
2. The parent makes one `SlotReference` of that for the result that it sends on. Its own claim on it
   lasts until B's task is answered (done or failed), so that the result can be sent again if B's
   worker dies.
3. Each worker of B that it is sent to has a claim as well. That worker knows the segment that the slot
   is in by its alias, a negative number that no other segment has, and gets a descriptor along the
   first time.
4. B's worker counts as it does for the parent's own slots: when the last view over the slot has died,
   its number goes back with the next event. The parent then ends that claim.
5. When a worker of B is gone, so are its claims. The parent's claims on what it had not answered end
   when that is sent again and answered, or with the crew.
6. With the last claim the number goes back to A's worker. A's worker never hears of B.
7. When A retires a segment, or is closed, every worker of B that knows it is told, with the next
   result that is sent on to it, to forget it. What it still looks at stays mapped until it is done.

Where a segment has no descriptor any more, or one of the crews has named slots or none, the parent
copies the buffers into its own slots for B's worker, or the stream; the header still goes as it is.
Only where B's workers would read the header otherwise than the parent does (``__main__``, functions
made on the spot, unless both crews are forks) is it loaded here and packed anew.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hybridloader.backends.process import descriptors
from hybridloader.backends.process.codec import TASK, encode_fields, encode_message, into_slots
from hybridloader.backends.process.result import ProcessResult, SlotReference, SlottedResult
from hybridloader.engine.messages import Message, Task
from hybridloader.memory import shared_slots
from hybridloader.memory.mapped_segment import MappedSegment
from hybridloader.memory.packing import pack, reads_the_same_everywhere
from hybridloader.memory.segments import Ticket
from hybridloader.memory.shared_slots import Notice, SlotMap, Span
from hybridloader.memory.slots import OWN, number_of, place_of

if TYPE_CHECKING:
    from hybridloader.memory.page_locks import PageLocks


class SlotChannel:
    """The parent's side of one worker's slots.

    Parameters
    ----------
    share
        Bytes that all slots of this worker may take, both ways together.
    kind
        ``"nameless"``, ``"named"`` or ``"stream"``.
    forks
        Whether the worker is a fork of this process.
    locks
        Locks the pages of results that are opened here.
    """

    def __init__(
        self, share: int, kind: str, *, forks: bool, locks: PageLocks | None = None
    ) -> None:
        self._share, self._kind, self._forks = share, kind, forks
        names = None
        if kind == "named":  # short: macOS allows 31 characters
            names = f"hl-{os.getpid()}-{os.urandom(4).hex()}-"
        self._names = names
        keep = descriptors.keep if kind == "nameless" else None
        self.results = shared_slots.SlotReader(share // 2, names, keep, locks)
        # All the other mutable state:
        self.refusal: str | None = None
        """Why a large task went through the stream, until somebody takes it from here."""
        self.forwarded: dict[int, ProcessResult] = {}
        """Results of other workers, by the task that was made of them and is not answered."""
        self.tasks: shared_slots.SlotWriter | None = None
        self.known: dict[int, MappedSegment] = {}  # segments of other workers, by alias
        self.claims: dict[int, list[SlotReference]] = {}  # of the worker, by slot as it knows it
        self._forgotten: deque[int] = deque()  # aliases it has yet to hear of; from any thread

    @property
    def slots(self) -> tuple[int, str | None] | None:
        """What the worker is told: bytes and how names begin; None without slots."""
        return None if self._kind == "stream" else (self._share, self._names)

    @property
    def taken(self) -> tuple[int, int] | None:
        """Bytes that the slots for results take, and that all slots of this worker may; None without."""
        if self._kind == "stream":
            return None
        return self.results.size, self._share

    def encode(self, message: Message) -> tuple[list[Any], Sequence[int]]:
        """The letter, and descriptors to be sent along and then closed."""
        returned = self.results.returned()
        try:
            if type(message) is not Task:
                return encode_message(message, returned, other_main=not self._forks), ()
            seq, index = message
            kind = type(index[0]) if type(index) is list and index else type(index)
            if kind is int or kind is str:  # what a sampler gives
                try:
                    return [encode_fields(TASK, seq, pickle.dumps(index, 5), returned)], ()
                except Exception:  # a mixed list with something in it that plain pickle can't do
                    pass
            if isinstance(index, ProcessResult):
                return self._forward(seq, returned, index)
            return self._enclose(seq, returned, index)
        except BaseException:
            for number in returned:
                self.results.hand_back(number)
            raise

    def hold(self, seq: int, result: ProcessResult) -> dict[int, SlotReference]:
        """Keep what task `seq` was made of, so that it can be sent again, until it is answered."""
        self.forwarded[seq] = result
        return result.holds()

    def take_back(self, numbers: Iterable[int]) -> None:
        """The worker is done with these."""
        own = []
        for number in numbers:
            if number >= 0:
                own.append(number)
            else:
                self.claims[number].pop().release()
        if own and self.tasks is not None:
            self.tasks.release(own)

    def answered(self, seq: int) -> None:
        """Task `seq` needs not be sent again."""
        result = self.forwarded.pop(seq, None)
        if result is not None:
            result.answered()

    def all_answered(self) -> None:
        """No task that this worker was given will be sent again."""
        for seq in list(self.forwarded):
            self.answered(seq)

    def worker_gone(self) -> None:
        """End the worker's claims, and the slots that were for it alone."""
        claims, self.claims = self.claims, {}
        for holds in claims.values():
            for hold in holds:
                hold.release()
        for seen in list(self.known.values()):
            seen.listeners.discard(self)
        self.known.clear()
        if self.tasks is not None:
            self.tasks.close()
            self.tasks.sweep()
            self.tasks = None

    def close(self) -> None:
        """The worker is gone and nothing will be sent again."""
        self.worker_gone()
        self.all_answered()
        self.results.close()
        self.results.sweep()

    def forget(self, alias: int) -> None:
        """Note that a segment of another worker is gone. May be called from any thread."""
        self._forgotten.append(alias)
        self.known.pop(alias, None)

    # -- the parts -----------------------------------------------------------------------------------

    def _writer(self) -> shared_slots.SlotWriter | None:
        if self.tasks is None and self._kind != "stream":
            limit, self.results.limit = shared_slots.both_ways(self._share)
            names = None if self._names is None else shared_slots.task_names(self._names)
            self.tasks = shared_slots.SlotWriter(limit, names)
        return self.tasks

    def _enclose(
        self, seq: int, returned: list[int], index: Any
    ) -> tuple[list[Any], Sequence[int]]:
        packed, buffers = pack(index, "a task", other_main=not self._forks)
        large = buffers or len(packed) >= OWN
        slots = self._writer() if large else None
        slot_map, header, streamed, fds = into_slots(packed, buffers, slots)
        if slot_map is not None:
            self.refusal = self.refusal or slot_map.refusal
        return [encode_fields(TASK, seq, header, returned, slot_map), *streamed], fds

    def _forward(
        self, seq: int, returned: list[int], result: ProcessResult
    ) -> tuple[list[Any], Sequence[int]]:
        holds = self.hold(seq, result)
        try:
            same = self._forks and result.forks
            if not same and not reads_the_same_everywhere(result.pickled()):
                return self._enclose(seq, returned, result.peek())
            return self._name(seq, returned, result, holds)
        except BaseException:
            self.answered(seq)
            raise

    def _name(
        self, seq: int, returned: list[int], result: ProcessResult, holds: dict[int, SlotReference]
    ) -> tuple[list[Any], Sequence[int]]:
        """A letter that names the slots of another worker, as far as this one can map them."""
        slots = (
            result.slots if isinstance(result, SlottedResult) else self.results
        )  # or none is named
        segments = {segment: slots.segments[segment] for segment, _ in map(place_of, holds)}
        for seen in segments.values():
            seen.mapped()  # it may raise
        forgotten = self._take_forgotten()
        aliases, new, fds = self._introduce(segments)
        named: dict[int, int] = {}  # slots, as this worker knows them
        for number in holds:
            segment, place = place_of(number)
            if segment in aliases:
                named[number] = number_of(aliases[segment], place)
        spans: list[Span | None] = []
        rest: list[memoryview] = []  # what must be copied: one for each None in `spans`
        stream = iter(result.buffers)
        for span in result.spans():
            if span is None:
                rest.append(next(stream))
            elif span.slot in named:
                span = span._replace(slot=named[span.slot])
            else:
                rest.append(slots.view(span))
                span = None
            spans.append(span)
        for number, name in named.items():
            holds[number].add()
            self.claims.setdefault(name, []).append(holds[number])
        header: Any = result.header
        if self._kind == "stream":
            return [encode_fields(TASK, seq, header or rest.pop(), returned), *rest], ()
        own: SlotMap | None = None
        own_fds: Sequence[int] = ()
        if rest or len(header) >= OWN:
            own, header, rest, own_fds = into_slots(header, rest, self._writer())
        if own is not None:
            self.refusal = self.refusal or own.refusal
            copied = iter(own.spans)
            spans = [next(copied) if span is None else span for span in spans] + list(copied)
            new, forgotten = [*own.new, *new], [*own.retired, *forgotten]
        slot_map = None
        if spans or forgotten:
            slot_map = SlotMap(tuple(spans), tuple(new), tuple(forgotten), None)
        return [encode_fields(TASK, seq, header, returned, slot_map), *rest], [*own_fds, *fds]

    def _introduce(
        self, segments: dict[int, MappedSegment]
    ) -> tuple[dict[int, int], list[Notice], list[int]]:
        """Aliases of those that the worker can map, and what it needs for those that are new to it."""
        aliases: dict[int, int] = {}
        new: list[Notice] = []
        fds: list[int] = []
        for number, seen in segments.items():
            alias = seen.alias
            if alias in self.known:
                aliases[number] = alias
                continue
            kept = seen.kept
            if kept is None or self._kind != "nameless" or len(new) == shared_slots.MOST_NEW:
                continue
            # First this, then the descriptor: whoever closes A does the same the other way round, maybe
            # on another thread, so that no worker is left with memory that nobody tells it to forget.
            seen.listeners.add(self)
            fd = kept.duplicate()
            if fd is None:
                seen.listeners.discard(self)
                continue
            self.known[alias] = seen
            aliases[number] = alias
            new.append(Notice(alias, seen.capacity, Ticket(seen.mapped().size, None)))
            fds.append(fd)
        return aliases, new, fds

    def _take_forgotten(self) -> list[int]:
        found = []
        while self._forgotten:
            alias = self._forgotten.popleft()
            self.known.pop(alias, None)
            found.append(alias)
        return found
