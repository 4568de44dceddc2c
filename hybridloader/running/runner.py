"""Runner: the stages of one iterator, and the relays that pull them. All of it ends together."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from hybridloader.engine.contract import CLOSING
from hybridloader.engine.feed import Relay
from hybridloader.engine.stage import Stage


class Runner:
    """Stages, and relays whose threads pull them.

    The finalizer of an iterator closes it, so it holds nothing that may hold that iterator: no sampler
    and no loader.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()

    @property
    def running_stages(self) -> Iterable[Stage]:
        """Stages that were started."""
        raise NotImplementedError

    @property
    def running_relays(self) -> Iterable[Relay]:
        """Relays that were made."""
        raise NotImplementedError

    def break_off(self) -> None:
        """End the epoch that runs, and the threads of its relays; the workers stay."""
        if os.getpid() != self.owner:
            return
        deadline = time.monotonic() + CLOSING
        for relay in self.interrupt():
            relay.close(deadline)

    def interrupt(self) -> list[Relay]:
        """Interrupt all stages; return the relays, whose threads end now."""
        relays = [*self.running_relays]
        for relay in relays:
            relay.shut()
        for stage in self.running_stages:
            stage.interrupt()
        return relays

    def close(self) -> None:
        """End everything: from any thread, any number of times; within some 2 seconds.

        A garbage collection may call it on the thread of a relay, within a stage: that stage ends when
        its call returns.
        """
        if os.getpid() != self.owner:
            return
        deadline = time.monotonic() + CLOSING
        relays, stages = self.interrupt(), [*self.running_stages]
        for stage in stages:
            stage.leave(deadline)
        for stage in stages:
            stage.close()
        for relay in relays:
            relay.close(deadline)
