"""How long the threads between stages were held up: what the statistics say of a relay's place."""

from __future__ import annotations

import time

from hybridloader.engine.relay import Relay
from hybridloader.pipeline.running.plan import RelayNode


class RelayMetrics:
    """How long a relay's thread was held up, over all relays that had its place."""

    def __init__(self, node: RelayNode) -> None:
        self.node = node
        self.began = time.monotonic()
        self.ended: float | None = None
        self._relay: Relay | None = None
        self._blocked = self._waited = 0.0
        self._items = 0

    def follow(self, before: Relay | None, relay: Relay) -> None:
        """`relay` takes the place of `before`."""
        if before is not None:
            before.shut()
            self._blocked += before.queue.blocked
            self._waited += before.queue.waited
            self._items += before.queue.count
        self._relay = relay

    @property
    def blocked(self) -> float:
        """Seconds that its thread waited for whoever takes."""
        return self._blocked + (self._relay.queue.blocked if self._relay is not None else 0.0)

    @property
    def waited(self) -> float:
        """Seconds that whoever takes waited."""
        return self._waited + (self._relay.queue.waited if self._relay is not None else 0.0)

    @property
    def items(self) -> int:
        """That went through."""
        return self._items + (self._relay.queue.count if self._relay is not None else 0)

    @property
    def queued(self) -> int:
        """Items that wait now."""
        return 0 if self._relay is None else len(self._relay.queue.items)

    @property
    def elapsed(self) -> float:
        return (time.monotonic() if self.ended is None else self.ended) - self.began
