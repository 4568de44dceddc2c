"""``seeding="sample"`` for workers that share a process: each thread draws from generators of its own.

A sample on a thread must not move the global generators, which belong to the training loop, and must
draw what it would draw in a process of its own. So while such workers run, `random`, `numpy.random` and
torch look at the thread first (see `stand_ins`). What gets past them, by a function that C holds, cannot
be helped from here; it is looked for, and reported once. Never touches a global generator's state.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from hybridloader.seeds.draws import Draws, now
from hybridloader.seeds.sample_seeds import Origin
from hybridloader.seeds.stand_ins import StandIns, installation
from hybridloader.worker_info import Description, get_worker_info, set_worker_info

T = TypeVar("T")

_NO_MODE: AbstractContextManager[Any] = nullcontext()


class _Pool(threading.local):
    """A thread's stand-ins: one for each sample that it is in the middle of."""

    def __init__(self) -> None:
        self.made: list[StandIns] = []
        self.depth = 0
        self.infos: dict[int, tuple[Any, Any]] = {}  # by the identity of that which was told before


_pool = _Pool()


class ThreadDraws(Draws):
    """Gives each thread generators of its own while it makes a sample. See `Draws`."""

    def __init__(
        self,
        origin: Origin,
        worker: int,
        number: int = 0,
        base: Draws | None = None,
        *,
        stage: str = "",
    ) -> None:
        self._end: Any = None
        self._reported: set[str] = set()
        self._stage = stage
        if isinstance(base, ThreadDraws):  # told once for the stage
            self._reported, self._stage = base._reported, base._stage
        super().__init__(origin, worker, number, base)

    def prepare(self) -> None:
        installation.take()
        self._end = weakref.finalize(self, installation.give_back)
        self._end.atexit = False

    def release(self) -> None:
        if self._end is not None:
            self._end()

    def rng(self) -> Any:
        """The stand-ins of the calling thread, for `WorkerInfo.rng`."""
        return _stand_ins(0).as_rng()

    def call(self, kind: bytes, key: bytes, function: Callable[..., T], *arguments: Any) -> T:
        digest = self.digest(kind, key)
        depth = _pool.depth
        mine = _stand_ins(depth)
        mine.seed(digest)
        outer = now.digest, now.own, now.stand_ins, now.item
        info = _taught(mine, depth)
        before = installation.fingerprints()
        _pool.depth = depth + 1
        now.digest, now.own, now.stand_ins = digest, None, mine
        try:
            with _NO_MODE if mine.mode is None else mine.mode:
                return function(*arguments)
        finally:
            now.digest, now.own, now.stand_ins, now.item = outer
            _pool.depth = depth
            if info is not None:
                set_worker_info(info)
            moved = installation.moved(before) | mine.past
            if moved:
                mine.past = set()
                self._report(moved - self._reported, key)

    def _report(self, moved: set[str], key: bytes) -> None:
        self._reported.update(moved)
        for generator in sorted(moved):
            where = f" of stage {self._stage!r}" if self._stage else ""
            warnings.warn(
                f"{_WORDS[generator]} while a thread made sample {_shown(key)}{where}. If it was the "
                "sample, its numbers do not follow from its index and differ from those it has on "
                f"processes: {_ADVICE[generator]} If it was your loop, on another thread, nothing is "
                "wrong. (Told once for each worker and generator.)",
                RuntimeWarning,
                stacklevel=4,
            )


_WORDS = {
    "random": "the generator of `random` was moved past hybridloader, as by a function that was "
    "imported on its own (`from random import random`),",
    "numpy": "the generator of `numpy.random` was moved past hybridloader, as by a function that was "
    "imported on its own (`from numpy.random import rand`) or by `numpy.random.mtrand._rand`,",
    "torch": "torch's default generator was moved by an operation that takes no generator, such as "
    "dropout,",
}
_ADVICE = {
    "random": "call it as `random.random()`, or use `hybridloader.rng().python`.",
    "numpy": "call it as `numpy.random.rand()`, or use `hybridloader.rng().numpy`.",
    "torch": "draw with `hybridloader.rng().torch`, or use a backend of processes.",
}


def _shown(key: bytes) -> str:
    text = key.decode("utf-8", "replace")
    return text[1:] if text[:1] in ("i", "s") else text


def _stand_ins(depth: int) -> StandIns:
    made = _pool.made
    while len(made) <= depth:
        made.append(StandIns())
    return made[depth]


def _taught(mine: StandIns, depth: int) -> Any:
    """Have `get_worker_info().rng` be what this thread draws from; what it was before, if it was not."""
    info: Any = get_worker_info()
    if info is None or getattr(info, "rng", None) is None or info.rng is mine.as_rng():
        return None
    known = _pool.infos.get(depth)
    if known is None or known[0] is not info:
        facts = {name: getattr(info, name) for name in Description.__dataclass_fields__}
        facts["rng"] = mine.as_rng()
        description = Description(**facts)
        told: Any = description.in_torchs_words() if "torch" in sys.modules else description
        known = _pool.infos[depth] = (info, told)
    set_worker_info(known[1])
    return info
