"""A worker that is forked from a fresh process finds what one that is started afresh finds.

Both are asked the same questions (`support.process_probes`). The one that loky starts is right.
"""

from __future__ import annotations

import atexit
import os
import random
import resource
import secrets
import signal
import sys
import tempfile
import uuid
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.plain_datasets import told
from support.process_probes import PROBES, Asked

from hybridloader.backends.process import fork_safety
from hybridloader.backends.process.backend import SharedMemory, Spawn
from hybridloader.engine.worker import get_worker_info

pytestmark = [
    pytest.mark.skipif(not fork_safety.available(), reason="needs fork, /proc and pidfds"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

BACKENDS: dict[str, Any] = {
    "fresh": Spawn(preload=False),
    "spawn": Spawn(),
    "shared-memory-forkserver": SharedMemory(start_method="forkserver"),
}

WAYS = ["spawn", pytest.param("shared-memory-forkserver", marks=pytest.mark.full)]

Answers = dict[str, list[dict[str, Any]]]
"""By way: of each of two workers, by probe."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Answers of the workers of a process that is unusual in all that a worker could take over."""
    before = os.getcwd(), os.umask(0o027), resource.getrlimit(resource.RLIMIT_CORE)
    ignored = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    resource.setrlimit(resource.RLIMIT_CORE, (0, before[2][1]))
    os.environ["PROBED"] = "set after the imports"
    sys.path.append("/of/the/parent")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "of the parent")
            return {
                way: told(Asked(2), 2, backend=backend, generator=torch.Generator().manual_seed(3))
                for way, backend in BACKENDS.items()
            }
    finally:
        sys.path.remove("/of/the/parent")
        del os.environ["PROBED"]
        resource.setrlimit(resource.RLIMIT_CORE, before[2])
        signal.signal(signal.SIGUSR2, ignored)
        os.umask(before[1])
        os.chdir(before[0])


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("way", WAYS)
def test_a_forked_worker_finds_what_a_fresh_one_finds(
    answers: Answers, way: str, probe: str
) -> None:
    fresh, forked = ([worker[probe] for worker in answers[name]] for name in ("fresh", way))
    assert forked == fresh


@pytest.mark.parametrize("way", WAYS)
def test_a_forked_worker_has_no_more_descriptors(answers: Answers, way: str) -> None:
    for fresh, forked in zip(answers["fresh"], answers[way], strict=True):
        had, has = fresh["descriptors"], forked["descriptors"]
        more = {name: n - had.get(name, 0) for name, n in has.items() if n > had.get(name, 0)}
        # multiprocessing opens a standard input for each process, and forgets that of the one before.
        assert more in ({}, {"/dev/null": 1})


def drawn() -> list[Any]:
    """Numbers that no seed decides."""
    return [
        random.SystemRandom().random(),
        float(np.random.default_rng().random()),
        secrets.token_hex(8),
        str(uuid.uuid4()),
        tempfile.mktemp(dir="/"),
        random.Random().random(),
        torch.Generator().seed(),
    ]


@pytest.mark.parametrize("way", WAYS)
def test_what_no_seed_decides_differs_from_worker_to_worker(way: str) -> None:
    one, other = told(Asked(2, drawn), 2, backend=BACKENDS[way])
    assert all(a != b for a, b in zip(one["extra"], other["extra"], strict=True))


def mark(worker: int) -> None:
    os.environ[f"PROBED_{worker}"] = str(worker)
    sys.path.append(f"/of/{worker}")
    warnings.filterwarnings("ignore", f"of {worker}")
    os.chdir("/")


def marks() -> Any:
    info = get_worker_info()
    assert info is not None
    of_init_fns = [repr(one[1]) for one in warnings.filters if "of " in repr(one[1])]
    variables = [name for name in os.environ if name.startswith("PROBED_")]
    return info.id, variables, [p for p in sys.path if p.startswith("/of/")], len(of_init_fns)


@pytest.mark.parametrize("way", [pytest.param("fresh", marks=pytest.mark.full), *WAYS])
def test_what_one_workers_init_fn_changes_is_that_workers_alone(way: str) -> None:
    found = told(Asked(3, marks), 3, backend=BACKENDS[way], worker_init_fn=mark)
    assert [one["extra"] for one in found] == [
        (n, [f"PROBED_{n}"], [f"/of/{n}"], 1) for n in range(3)
    ]


class Registering(Asked):
    """Notes in a folder the processes that run its exit functions, of loading and of a sample."""

    def __init__(self, folder: Path) -> None:
        super().__init__(2, self.register)
        self.folder = folder

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        atexit.register(self.note, "loaded")

    def register(self) -> int:
        atexit.register(self.note, "read")
        return os.getpid()

    def note(self, name: str) -> None:
        (self.folder / f"{name}-{os.getpid()}").touch()


@pytest.mark.parametrize("way", [pytest.param("fresh", marks=pytest.mark.full), *WAYS])
def test_each_worker_runs_its_exit_functions(way: str, tmp_path: Path) -> None:
    found = told(Registering(tmp_path), 2, backend=BACKENDS[way])
    expected = {f"{name}-{one['extra']}" for one in found for name in ("loaded", "read")}
    assert {file.name for file in tmp_path.iterdir()} == expected
