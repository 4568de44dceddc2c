"""Number of native threads in a worker: one, because the workers are the parallelism.

torch sets this in its worker processes too. On a worker thread `torch.set_num_threads` would change
the whole process. So the OpenMP runtime is set, which keeps the number per thread (OpenMP 5.2, 2.4:
nthreads-var is an ICV of the task). The threads of the training code keep their number.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from hybridloader._support import system
from hybridloader._support.import_hooks import when_imported


def one_thread_in_this_process(fresh: bool) -> None:
    """Set one thread for torch, OpenMP, BLAS and OpenCV in a worker process.

    Variables that the environment already has stay, and a `worker_init_fn` may set other numbers.
    `fresh` is True if the libraries are not loaded yet: they read the environment when they load.
    """
    if fresh:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ.setdefault(name, "1")
    when_imported("torch", lambda: sys.modules["torch"].set_num_threads(1))
    # 0 makes OpenCV run sequentially (docs.opencv.org, cv::setNumThreads).
    when_imported("cv2", lambda: sys.modules["cv2"].setNumThreads(0))
    renew_autograd_engine()


def renew_autograd_engine() -> None:
    """Make torch replace its autograd engine in a forked process, before threads compute there.

    A forked process has the engine of its parent. torch replaces the engine at its first use, such as
    an operator that records a gradient. If two threads use it first, both destroy the old engine
    (`get_python_engine` in torch/csrc/autograd/python_engine.cpp, 2.13). With six threads, and a
    parent that had called ``backward()``, 8 of 3,000 processes died of SIGSEGV.
    """
    torch: Any = sys.modules.get("torch")
    with suppress(AttributeError):  # torch is None, half imported, or uses another name
        torch.autograd.Variable._execution_engine.is_checkpoint_valid()  # the cheapest use: 30 ns


def one_thread_on_this_thread() -> None:
    """Run torch's operators on this worker thread alone, if its OpenMP runtime is found."""
    torch = sys.modules.get("torch")
    runtime = _openmp()
    if torch is not None and runtime is not None:
        torch.get_num_threads()  # otherwise the first operator here resets it
        runtime.omp_set_num_threads(1)


@lru_cache(maxsize=1)
def _openmp() -> Any:
    """Return the OpenMP runtime that torch uses, or None. Never loads one that is not loaded."""
    if system.NO_LOAD is None:
        return None
    for path in _candidates():
        try:
            runtime = ctypes.CDLL(path, mode=system.NO_LOAD | os.RTLD_NOW)
            runtime.omp_set_num_threads.argtypes = [ctypes.c_int]
        except (OSError, AttributeError):
            continue
        return runtime
    return None


def _candidates() -> list[str]:
    name = re.compile(r"lib(gomp|iomp5|omp)[-.\w]*$")
    found = []
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__:  # torch's runtime precedes others that are loaded
        folder = Path(torch.__file__).parent / "lib"
        found = [str(path) for path in sorted(folder.glob("lib*omp*")) if name.search(path.name)]
    try:
        lines = Path(system.PROC, "self/maps").read_text().splitlines()
    except OSError:
        return found
    return list(dict.fromkeys([*found, *(line.split()[-1] for line in lines if name.search(line))]))
