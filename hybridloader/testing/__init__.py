"""Contract suite for authors of backends, and tools for tests that replace waiting.

`BackendContract` is the executable form of `hybridloader.engine.contract`: subclass it in a test
module, set `backend`, and pytest runs the suite. With a `Gate` a test decides when a worker goes on,
whichever kind of worker it is; with `FakeClock` and `ScriptedBackend` it decides what happens and when,
without any worker; `FakeAccelerator` is a device without a GPU. Nothing here is imported by the rest of
the package.
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
