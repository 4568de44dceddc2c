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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.plain_datasets import samples_of
from support.platforms import needs_zygote
from support.process_probes import PROBES, Asked

from hybridloader import SharedMemory, Spawn, get_worker_info

pytestmark = [needs_zygote, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

FRESH = Spawn(preload=False)

ways = pytest.mark.parametrize(
    "way",
    [
        Spawn(),
        pytest.param(SharedMemory(start_method="forkserver"), marks=pytest.mark.full),
    ],
    ids=["spawn", "shared-memory-forkserver"],
)


@pytest.fixture
def _unusual(tmp_path: Path) -> Iterator[None]:
    """This process is unusual in all that a worker could take over."""
    before = os.getcwd(), os.umask(0o027), resource.getrlimit(resource.RLIMIT_CORE)
    ignored = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    os.chdir(tmp_path)
    resource.setrlimit(resource.RLIMIT_CORE, (0, before[2][1]))
    os.environ["PROBED"] = "set after the imports"
    sys.path.append("/of/the/parent")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "of the parent")
        yield
    sys.path.remove("/of/the/parent")
    del os.environ["PROBED"]
    resource.setrlimit(resource.RLIMIT_CORE, before[2])
    signal.signal(signal.SIGUSR2, ignored)
    os.umask(before[1])
    os.chdir(before[0])


@pytest.mark.usefixtures("_unusual")
@ways
def test_a_forked_worker_finds_what_a_fresh_one_finds_and_no_more_descriptors(way: Any) -> None:
    found, expected = (
        samples_of(Asked(2), 2, backend=backend, generator=torch.Generator().manual_seed(3))
        for backend in (way, FRESH)
    )
    assert len(found) == 2
    for forked, fresh in zip(found, expected, strict=True):
        had, has = fresh.pop("descriptors"), forked.pop("descriptors")
        assert {name: forked[name] for name in PROBES} == {name: fresh[name] for name in PROBES}
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


class Registering(Asked):
    """Notes in a folder the processes that run its exit functions, of loading and of a sample."""

    def __init__(self, folder: Path) -> None:
        super().__init__(2, self.register)
        self.folder = folder

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        atexit.register(self.note, "loaded")

    def register(self) -> Any:
        atexit.register(self.note, "read")
        return os.getpid(), marks(), drawn()

    def note(self, name: str) -> None:
        (self.folder / f"{name}-{os.getpid()}").touch()


@ways
def test_what_a_worker_changes_registers_or_draws_without_a_seed_is_its_own(
    way: Any, tmp_path: Path
) -> None:
    answers = samples_of(Registering(tmp_path), 2, backend=way, worker_init_fn=mark)
    pids, found, draws = zip(*(one["extra"] for one in answers), strict=True)
    assert found == tuple((n, [f"PROBED_{n}"], [f"/of/{n}"], 1) for n in range(2))
    assert all(one != other for one, other in zip(*draws, strict=True))
    expected = {f"{name}-{pid}" for pid in pids for name in ("loaded", "read")}
    assert {file.name for file in tmp_path.iterdir()} == expected
