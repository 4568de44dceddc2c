"""For authors of backends and for our own tests: a contract suite, and tools that replace waiting.

`BackendContract` is the executable form of `hybridloader.engine.contract`: subclass it in a test
module, set `backend`, and pytest runs the suite. `Gate` lets a test decide when a worker goes
on, wherever that worker lives; `FakeClock` and `ScriptedBackend` let it decide what happens and when,
with no worker at all; `FakeAccelerator` is a device without a GPU. Nothing here is imported by the
rest of the package.
"""

from hybridloader.testing.fake_accelerator import FakeAccelerator
from hybridloader.testing.suite import BackendContract
from hybridloader.testing.tools import FakeClock, Gate, ScriptedBackend, ScriptedCrew
from hybridloader.testing.work import Call, Count

__all__ = [
    "BackendContract",
    "Call",
    "Count",
    "FakeAccelerator",
    "FakeClock",
    "Gate",
    "ScriptedBackend",
    "ScriptedCrew",
]
