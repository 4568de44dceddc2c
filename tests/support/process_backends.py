"""Backends whose slots have names, as without descriptors to send; and warnings that may come again."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

from hybridloader.backends.process import backend
from hybridloader.backends.process.backend import Fork
from hybridloader.engine import Crew
from support import once


@dataclass(frozen=True)
class NamedFork(Fork):
    def open(self) -> Crew:
        with mock.patch.object(backend, "nameless_slots", return_value=False):
            return super().open()


def forget_warnings() -> None:
    """Let each warning come once more, those of forks too."""
    once.forget_warnings()
    backend._warned.clear()
