"""Backends of processes as on a platform whose connections carry no descriptors: slots have names."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

from hybridloader.backends.process import backend
from hybridloader.backends.process.backend import Fork, SharedMemory
from hybridloader.engine.contract import Crew


@dataclass(frozen=True)
class NamedFork(Fork):
    def open(self) -> Crew:
        with mock.patch.object(backend, "nameless_slots", return_value=False):
            return super().open()


@dataclass(frozen=True)
class NamedSharedMemory(SharedMemory):
    def open(self) -> Crew:
        with mock.patch.object(backend, "nameless_slots", return_value=False):
            return super().open()
