"""`get_worker_info` for workers of every kind, and functions to be called at the end of a worker.

torch keeps the result in one global of the process, which is wrong for a worker thread. Here it is
kept per thread, and the code of torch's function is replaced by code that reads the thread's result
first. So it does not matter how the function was imported. torch's `collate_tensor_fn` receives None
(docs/decisions.md has the reason). Limits:

- In a worker thread the result belongs to that thread and to those of `threads_per_worker`. Other
  threads that a dataset starts receive None, as in the training script; pass them the `WorkerInfo`. In
  a worker process every thread receives the result, as with torch.
- Code that reads ``torch.utils.data._utils.worker._worker_info`` finds torch's global, which is set in
  worker processes and stays None in threads. A function that was made out of torch's code before the
  first worker started finds the same.
- The first worker of a process changes torch's function for good; without a worker its answer is the
  same as before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridloader._support import system
from hybridloader._support.torch_env import when_imported
from hybridloader._support.user_objects import show

if TYPE_CHECKING:
    from torch.utils.data._utils.worker import WorkerInfo


class _Current(threading.local):
    info: WorkerInfo | None = None
    asked = False  # code on this thread, which is a worker's, has asked for it


_current = _Current()

_at_end: dict[int, list[Callable[[], Any]]] = {}
"""By the identity of the worker's info. A process has one worker, whose info may be replaced."""


def _forget_thread() -> None:
    """Forget the info of the thread that forked: the child is no worker, or a worker of another loader.

    The functions that workers of the parent registered are the parent's, too.
    """
    vars(_current).clear()
    _at_end.clear()


system.at_fork(after_in_child=_forget_thread)


def get_worker_info() -> WorkerInfo | None:
    """Return information about the worker that runs this code; None outside of any worker.

    Returns
    -------
    WorkerInfo or None
        torch's own class (or, in a process that has not imported torch, one with the same
        attributes): `id`, `num_workers`, `seed` (``base_seed + id``), `dataset` (the copy
        that this worker reads), `rng` (random generators of this worker alone, for threads) and
        `worker_method` (``"thread"``, ``"multiprocessing"`` or ``"inline"``).
    """
    info = _current.info
    if info is not None:
        _current.asked = True
    return info


def asked_for_info() -> bool:
    """True if code on this thread may divide data by the worker's number, or need not."""
    info = _current.info
    return _current.asked or info is None or info.num_workers < 2


@dataclass(frozen=True)
class Description:
    """Fields of a `WorkerInfo`, in place of one in a process that has not imported torch."""

    id: int
    num_workers: int
    seed: int
    dataset: Any
    rng: Any
    worker_method: str

    def in_torchs_words(self) -> WorkerInfo:
        from torch.utils.data._utils.worker import WorkerInfo

        return WorkerInfo(**vars(self))


def describe(**facts: Any) -> Any:
    """Return a `WorkerInfo`, or a `Description` if torch is not imported."""
    description = Description(**facts)
    return description.in_torchs_words() if "torch" in sys.modules else description


def set_process_info(info: Any) -> None:
    """Make `info` the answer on every thread of this process: it belongs to one worker."""
    vars(_current).pop("info", None)
    _Current.info = info
    when_imported("torch", _teach_process)


def _teach_process() -> None:
    from torch.utils.data._utils import worker

    _teach_torch()
    info: Any = _Current.info
    if isinstance(info, Description):
        _Current.info = info.in_torchs_words()
    torchs: Any = worker
    torchs._worker_info = _Current.info  # for code that reads it; a process has one worker


def set_worker_info(info: WorkerInfo | None) -> None:
    """Make `info` the answer on this thread, for our function and for torch's."""
    if info is not None:
        _teach_torch()
    _current.info = info


@contextmanager
def worker_info_set(info: WorkerInfo | None) -> Iterator[None]:
    """Make `info` the answer on this thread within the block."""
    before = _current.info
    set_worker_info(info)
    try:
        yield
    finally:
        _current.info = before


def _teach_torch() -> None:
    """Give torch's function code that asks the thread first. Once per process."""
    from torch.utils.data._utils import collate, worker

    original: Any = worker.get_worker_info
    if original.__globals__.get("_hybridloader_current") is _current:
        return

    def body() -> Any:
        info = _hybridloader_current.info  # type: ignore[name-defined]  # noqa: F821
        if info is None:
            return _worker_info  # type: ignore[name-defined]  # noqa: F821
        if _hybridloader_caller(1).f_code.co_filename == _hybridloader_collate:  # type: ignore[name-defined]  # noqa: F821
            return None
        _hybridloader_current.asked = True  # type: ignore[name-defined]  # noqa: F821
        return info

    original.__globals__.update(
        _hybridloader_current=_current,
        _hybridloader_caller=sys._getframe,
        _hybridloader_collate=collate.default_collate.__code__.co_filename,
    )
    original.__code__ = body.__code__


def at_end_of_worker(function: Callable[[], Any]) -> bool:
    """Register `function` for the end of the worker that runs this code; return False without a worker.

    An error that the function raises is printed. It may run on another thread of the worker.
    """
    info = get_worker_info()
    if info is None:
        return False
    _at_end.setdefault(id(info), []).append(function)
    return True


def end_worker(info: Any) -> None:
    """Call the functions that were registered in the worker with this info, the last one first."""
    keys = [*_at_end] if info.worker_method == "multiprocessing" else [id(info)]
    for key in keys:
        for function in reversed(_at_end.pop(key, ())):
            try:
                function()
            except Exception as error:  # the worker ends in any case
                show(error)
