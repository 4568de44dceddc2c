"""Contract suite for authors of backends, and tools for tests that replace waiting.

`BackendContract` is the executable form of `hybridloader.engine.contract`: subclass it in a test
module, set `backend`, and pytest runs the suite. The other tools are:

- `Gate` stops workers of any kind until the test opens it;
- `FakeClock` and `ScriptedBackend` let a test script events and times, without any worker.

The rest of the package does not import this one.
"""

from hybridloader.testing.suite import BackendContract
from hybridloader.testing.tools import (
    Call,
    Count,
    FakeClock,
    Gate,
    ScriptedBackend,
    ScriptedCrew,
)

__all__ = [
    "BackendContract",
    "Call",
    "Count",
    "FakeClock",
    "Gate",
    "ScriptedBackend",
    "ScriptedCrew",
]
