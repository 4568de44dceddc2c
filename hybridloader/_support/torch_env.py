"""torch in this process, if it is imported: hooks for its import, numbers of threads, modes, devices.

A worker process imports torch only if it needs it. If the user's code imports torch later, a hook
sets torch's seed and number of threads before that code uses torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from hybridloader._support import system


def when_imported(name: str, act: Callable[[], None]) -> None:
    """Call `act` once the module `name` has been imported.

    The import raises the errors of `act`. `act` may import `name`.
    """
    if name in sys.modules:
        act()
        return
    sys.meta_path.insert(0, _Finder(name, act))


class _Finder(MetaPathFinder):
    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name, self._act = name, act
        self._looking = threading.local()  # per thread: another may import the module meanwhile

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or hasattr(self._looking, "now"):
            return None
        self._looking.now = True  # find_spec asks all finders in sys.meta_path, this one too
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            del self._looking.now
        loader: Any = None if spec is None else spec.loader
        if spec is not None and loader is not None:
            run = partial(self._run, loader.exec_module)
            try:
                loader.exec_module = run
            except AttributeError:  # a loader without a `__dict__`, as a compiler's own may be
                create: Any = getattr(loader, "create_module", lambda spec: None)
                spec.loader = SimpleNamespace(create_module=create, exec_module=run)  # type: ignore[assignment]
        return spec

    def _run(self, exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
        exec_module(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._act()


# -- the number of native threads in a worker: one, because the workers are the parallelism
#
# torch sets this in its worker processes too. On a worker thread `torch.set_num_threads` would change
# the whole process. So the OpenMP runtime is set, which keeps the number per thread (OpenMP 5.2, 2.4:
# nthreads-var is an ICV of the task). The threads of the training code keep their number.


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
    name = re.compile(r"lib(gomp|iomp5|omp)[-.\w]*$")
    torch, found = sys.modules.get("torch"), []
    if torch is not None and torch.__file__:  # torch's runtime precedes others that are loaded
        folder = Path(torch.__file__).parent / "lib"
        found = [str(path) for path in sorted(folder.glob("lib*omp*")) if name.search(path.name)]
    with suppress(OSError):
        lines = Path(system.PROC, "self/maps").read_text().splitlines()
        found += [line.split()[-1] for line in lines if name.search(line)]
    for path in dict.fromkeys(found):
        with suppress(OSError, AttributeError):
            runtime = ctypes.CDLL(path, mode=system.NO_LOAD | os.RTLD_NOW)
            runtime.omp_set_num_threads.argtypes = [ctypes.c_int]
            return runtime
    return None


# -- modes of a thread
#
# A thread of this package adopts these modes from the thread that it works for. docs/backends.md lists
# the modes that it does not adopt.


class Modes(NamedTuple):
    """Modes of a thread; at least one differs from those of a new thread."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, Any], ...]
    """Each type of device for which autocast is on, with its dtype."""
    cache: bool
    """True if autocast keeps the weights that it has cast."""
    device: str
    """Default device of new tensors."""


_OF_A_NEW_THREAD = Modes(True, False, (), True, "cpu")


def modes_here() -> Modes | None:
    """Return the modes of this thread; None if they equal those of a new thread."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    from hybridloader._support.installed_torch import current_accelerator, default_device

    accelerator = current_accelerator()
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    casts = [
        (kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)
    ]
    modes = Modes(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple(casts),
        torch.is_autocast_cache_enabled() if casts else True,
        # torch implements a default device as a function mode; most threads have none.
        str(default_device()) if torch._C._is_torch_function_mode_enabled() else "cpu",
    )
    return None if modes == _OF_A_NEW_THREAD else modes


class TakenModes(ExitStack):
    """Modes that this thread has adopted; the end of the block restores the thread's modes."""

    _modes: Modes | None = None

    def take(self, modes: Modes | None) -> None:
        """Adopt `modes` in place of the ones adopted before, if they differ."""
        if modes == self._modes:
            return
        self.close()
        self._modes = modes
        if modes is None:
            return
        torch: Any = sys.modules["torch"]
        if modes.inference:
            self.enter_context(torch.inference_mode())
        self.enter_context(torch.set_grad_enabled(modes.grad))
        for kind, dtype in modes.autocast:
            self.enter_context(torch.autocast(kind, dtype, cache_enabled=modes.cache))
        if modes.device != "cpu":
            # `with device:` also records the device for the whole process. Threads that enter and leave
            # in any order would leave a wrong device there, and torch.compile would compile again.
            device, mode = torch.utils._device.DeviceContext(modes.device), torch.overrides
            mode.TorchFunctionMode.__enter__(device)
            self.callback(mode.TorchFunctionMode.__exit__, device, None, None, None)


# -- data pipes: their graph allows one thread at a time


def is_datapipe(dataset: Any) -> bool:
    """Return True if `dataset` is one of torch's data pipes.

    torch finds the parts of a pipe by pickling it. Meanwhile it keeps a hook on the class
    (torch/utils/data/graph.py, 2.13). A pipe that another thread walks or pickles at that moment
    becomes ``'STUB'``.
    """
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(dataset, (data.IterDataPipe, data.MapDataPipe))


_walking = system.renewed_in_forks(threading.Lock())


def seed_datapipe(dataset: Any, shared_seed: int) -> Any:
    """Seed the shufflers of an `IterDataPipe` from the seed that all its workers share."""
    import torch
    from torch.utils.data.graph_settings import apply_random_seed

    with _walking:
        return apply_random_seed(dataset, torch.Generator().manual_seed(shared_seed))


# -- devices that this process uses; a query neither imports torch nor uses another device

_ACRONYMS = ("cuda", "xpu", "mps")


def modules() -> dict[str, Any]:
    """Return modules such as `torch.cuda`, by the kind of device; empty if torch is not imported.

    The modules are CUDA's and that of the accelerator which `torch.accelerator` names. If another
    package provides that accelerator, CUDA may be in use too.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    from hybridloader._support.installed_torch import current_accelerator

    found = {"cuda": torch.cuda}
    kind = current_accelerator()
    if kind is not None:
        found.setdefault(kind.type, torch.get_device_module(kind))
    return found


def initialized(module: Any) -> bool | None:
    """Return True if this process has a context on such a device; None if the module can't report it."""
    query = getattr(module, "is_initialized", None)
    return None if query is None else bool(query())


def device_in_use() -> str | None:
    """Return the kind of device on which this process has a context, for messages; None if none."""
    for kind, module in modules().items():
        if initialized(module):
            return kind.upper() if kind in _ACRONYMS else kind
    return None
