"""Stub of CUDA, for a Python with this folder in PYTHONPATH: executes every line for a device.

Tensors "on the device" are on the CPU, of a class that reports ``cuda:0``. All work is done at once, so
the stub shows neither a wait that is missing nor a time. Worker processes and scripts get it too.
"""

from __future__ import annotations

import functools
import os
import threading
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda", 0)
FACTORIES = (
    "arange",
    "empty",
    "eye",
    "full",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
)

in_use = False
pinned: set[int] = set()  # addresses
generator = [torch.zeros(16, dtype=torch.uint8)]
here = threading.local()

_to, _clone = torch.Tensor.to, torch.Tensor.clone


def use() -> None:
    global in_use
    in_use = True


class There(torch.Tensor):
    """Tensor on the device; so is each result of an operation on it."""

    device = CUDA  # type: ignore[assignment]

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return _clone(self).as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("the stub sends no tensor of a device to another process")


def is_cuda(device: Any) -> bool:
    return device is not None and str(device).partition(":")[0] == "cuda"


def to(self: torch.Tensor, *args: Any, **options: Any) -> Any:
    device = options.pop("device", None)
    if args and isinstance(args[0], (str, torch.device)):
        device, *args = args  # type: ignore[assignment]
    if device is None:
        return _to(self, *args, **options)
    if is_cuda(device):
        use()
        return self if isinstance(self, There) else _clone(self).as_subclass(There)
    return self.cpu() if isinstance(self, There) else _to(self, device, *args, **options)


def made(factory: Any) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, device: Any = None, **options: Any) -> Any:
        if not is_cuda(device):
            return factory(*args, device=device, **options)
        use()
        return factory(*args, **options).as_subclass(There)

    return make


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def is_pinned(self: torch.Tensor, *_: Any) -> bool:
    start = address(self)
    return not isinstance(self, There) and start in pinned


def pin_memory(self: torch.Tensor, *_: Any) -> torch.Tensor:
    use()
    if is_pinned(self):
        return self
    copy = _clone(self)
    pinned.add(address(copy))
    return copy


def record_stream(self: torch.Tensor, stream: Any) -> None:
    if not isinstance(self, There):
        raise NotImplementedError("Could not run 'aten::record_stream' with the 'CPU' backend")


class Event:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class Stream:
    def __init__(self, device: Any = None, number: int | None = None) -> None:
        use()
        self.device = CUDA
        self.number = id(self) if number is None else number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.number == other.number

    def __hash__(self) -> int:
        return hash(self.number)

    def is_capturing(self) -> bool:
        return getattr(here, "capturing", None) == self

    def record_event(self) -> Event:
        return Event()

    def wait_event(self, event: Event) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...
    def wait_stream(self, stream: Stream) -> None: ...


DEFAULT = Stream(number=0)
in_use = False


def current_stream(device: Any = None) -> Stream:
    found: Stream = getattr(here, "stream", DEFAULT)
    return found


def set_stream(stream: Stream) -> None:
    use()
    here.stream = stream


@contextmanager
def stream(stream: Stream) -> Any:
    before = current_stream()
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


class Capture(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(lambda: func(*args, **(kwargs or {})))
        return self.calls[-1]()


class CUDAGraph:
    capture: Any = None

    def replay(self) -> None:
        for call in self.capture.calls:
            call()


@contextmanager
def graph(graph: CUDAGraph, capture_error_mode: str = "global") -> Any:
    graph.capture, here.capturing = Capture(), Stream()
    try:
        with stream(here.capturing), graph.capture:
            yield
    finally:
        here.capturing = None


@contextmanager
def nothing(*_: Any) -> Any:
    yield


def synchronize(*_: Any) -> None: ...


for name in FACTORIES:
    setattr(torch, name, made(getattr(torch, name)))
for function in (to, is_pinned, pin_memory, record_stream):
    setattr(torch.Tensor, function.__name__, function)
torch.Stream = Stream  # type: ignore[assignment,misc]
torch.version.cuda = "of the stub"

common: dict[str, Any] = {
    "current_stream": current_stream,
    "device_count": lambda: 1,
    "empty_cache": lambda: None,
    "is_available": lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != "",
    "memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "set_stream": set_stream,
    "synchronize": synchronize,
}
of_accelerator: dict[str, Any] = {
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_device_index": lambda: 0,
    "device_index": nothing,
    "set_device_index": lambda index: use(),
}
of_cuda: dict[str, Any] = {
    "CUDAGraph": CUDAGraph,
    "Event": Event,
    "Stream": Stream,
    "current_device": lambda: 0,
    "device": nothing,
    "get_device_name": lambda device=None: "a stub",
    "get_rng_state": lambda device=None: generator[0],
    "graph": graph,
    "is_initialized": lambda: in_use,
    "manual_seed_all": lambda seed: None,
    "set_device": lambda device: use(),
    "set_rng_state": lambda state, device=None: generator.__setitem__(0, state),
    "stream": stream,
}
for module, patches in (
    (torch.cuda, common | of_cuda),
    (torch.accelerator, common | of_accelerator),
):
    for name, value in patches.items():
        setattr(module, name, value)
