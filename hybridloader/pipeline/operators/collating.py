"""Collation in the thread that pulls: samples become a batch, large ones in recycled slots.

The same collation and the same slots as in workers; see `hybridloader.fetching.collate` and
`hybridloader.memory.slots`. torch is imported only if its `default_collate` collates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hybridloader._support.arguments import function
from hybridloader._support.user_objects import Raised, foreign
from hybridloader.fetching.collate import is_default_collate, teach_torch
from hybridloader.memory.limits import Memory, check_memory
from hybridloader.memory.slots import PrivateSlots
from hybridloader.memory.thread_slots import set_slots
from hybridloader.running.operator import Operator

if TYPE_CHECKING:
    from hybridloader.memory.page_locks import PageLocks

CollateFn = Callable[[list[Any]], Any]

SIZE = "give the number of samples in a batch"
"""Request in errors about a size."""


class Collating:
    """A collate function and its slots, page-locked if a device is going to read them."""

    def __init__(
        self, collate_fn: CollateFn | None, memory: Memory, locks: PageLocks | None = None
    ) -> None:
        if collate_fn is None:
            from torch.utils.data import default_collate

            collate_fn = default_collate
        if is_default_collate(collate_fn):
            teach_torch()
        self._function = collate_fn
        self._slots = PrivateSlots(memory.bytes())
        if locks is not None:
            self._slots.page_lock(locks)

    def __call__(self, samples: list[Any]) -> Any:
        before = set_slots(self._slots)
        try:
            batch = self._function(samples)
        except Exception as error:
            Raised(foreign(error, "a collate_fn")).throw()
        finally:
            set_slots(before)
        if self._slots.refusal is not None:
            self._slots.warn()
        return batch


def check_collation(operator: Operator, collate_fn: Any, memory: Any) -> None:
    """Refuse a wrong collate function or limit of memory."""
    if collate_fn is not None:
        what = "a function from a list of samples to a batch (list keeps them as they are)"
        function(f"{operator.name}: collate_fn", collate_fn, what)
    check_memory(operator.name, memory)
