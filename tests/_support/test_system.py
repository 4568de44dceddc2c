"""Features of the platform, and the ends of processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from hybridloader._support import system
from hybridloader.memory import segments
from hybridloader.memory.shared_slots import SlotReader
from hybridloader.testing import DEADLINE


def test_a_missing_module_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search takes milliseconds, and the sweep after a dead worker asks 128 times."""
    asked: list[str] = []

    def fail(name: str) -> Any:
        asked.append(name)
        raise ImportError(name)

    monkeypatch.setattr(system, "import_module", fail)
    system.module.cache_clear()
    try:
        SlotReader(1, names="hl-0-0-").sweep()
        assert asked == ["_posixshmem"]
    finally:
        system.module.cache_clear()


def test_a_section_of_windows_is_open_while_it_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the death of its maker in between gives a section of zeros, in place of a batch."""
    made = segments.make(1 << 16, f"hl-{os.getpid()}-kept")
    seen: list[str] = []
    windows = SimpleNamespace(
        FILE_MAP_READ=4,
        OpenFileMapping=lambda access, inherit, name: seen.append(f"open {name}") or 1,
        CloseHandle=lambda handle: seen.append("close"),
    )
    real, attach = system.module, segments._shared_memory
    monkeypatch.setattr(system, "module", lambda name: windows if name == "_winapi" else real(name))
    monkeypatch.setattr(
        segments, "_shared_memory", lambda *args: seen.append("attach") or attach(*args)
    )
    segments.open_named(f"hl-{os.getpid()}-kept")
    assert seen == [f"open hl-{os.getpid()}-kept", "attach", "close"]
    del made


def test_limits_are_read_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    assert system.soft_limit("RLIMIT_OF_NOTHING") is None
    monkeypatch.setattr(system, "module", lambda name: None)
    assert system.soft_limit("RLIMIT_NOFILE") is None


def test_a_wait_for_a_process_ends_with_it() -> None:
    code = "import sys; sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    waiting = threading.Thread(target=system.await_end, args=(process.pid,))
    waiting.start()
    assert system.alive(process.pid)
    process.communicate(b"", timeout=DEADLINE)
    waiting.join(DEADLINE)
    assert not waiting.is_alive()
    assert not system.alive(process.pid)


def test_this_machine_has_memory() -> None:
    assert 1 << 28 < system.machine_memory() < 1 << 48
    assert system.alive(os.getpid())
