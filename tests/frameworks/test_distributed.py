"""torch.distributed: two gloo ranks, each with its part, on every backend."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.distributed_rank import BACKENDS, EPOCHS, SAMPLERS, SAMPLES
from support.made_once import folder_made_once

import hybridloader

TESTS = Path(__file__).parent.parent
WORLD = 2

pytestmark = pytest.mark.timeout(300)  # of which the ranks may take 160
NAMES = [str(backend) for backend in BACKENDS]


def dump_stacks_of_hanging(running: list[subprocess.Popen[bytes]]) -> None:
    """End ranks that hang, so that their stderr says where: their workers first, then themselves."""
    seconds = 5
    hanging = [rank for rank in running if rank.poll() is None]
    workers = [psutil.Process(rank.pid).children(recursive=True) for rank in hanging]
    for worker in itertools.chain.from_iterable(workers):
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGABRT)
    for rank in hanging:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(seconds)
        rank.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(seconds)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Records of each rank: one group for all tests, because torch takes seconds to import."""
    folder = folder_made_once(tmp_path_factory, "ranks", run_ranks)
    codes = json.loads((folder / "codes.json").read_text())
    errors = [(folder / f"stderr{rank}").read_text() for rank in range(WORLD)]
    assert codes == [0] * WORLD, f"the ranks ended with {codes}:\n" + "\n".join(errors)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


def run_ranks(folder: Path) -> None:
    root = Path(hybridloader.__file__).parent.parent
    path = os.pathsep.join([str(root), str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    script = str(TESTS / "support" / "distributed_rank.py")
    with contextlib.ExitStack() as files:
        running = [
            subprocess.Popen(
                [sys.executable, script, str(rank), str(WORLD), str(folder)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=files.enter_context((folder / f"stderr{rank}").open("wb")),
            )
            for rank in range(WORLD)
        ]
    try:
        for _ in range(2):  # waits, so that ranks go on after the whole machine has stood still
            for rank in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.wait(timeout=40)
        dump_stacks_of_hanging(running)
    finally:
        for rank in running:
            rank.kill()
            rank.wait()
    (folder / "codes.json").write_text(json.dumps([rank.returncode for rank in running]))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_rank_gets_what_torchs_loader_gives_it(ranks: list[Any], sampler: str) -> None:
    """The parts are disjoint and complete, and `set_epoch` makes another order."""
    spare = SAMPLES % WORLD
    for rank in ranks:
        seen = rank["indices"][sampler]
        assert all(seen[backend] == seen["torch"] for backend in NAMES)
        first, second = seen["threads"]
        assert (first != second) == ("dropping" not in sampler)  # the one that does not shuffle
    for epoch in range(EPOCHS):
        parts = [rank["indices"][sampler]["threads"][epoch] for rank in ranks]
        times = Counter(index for part in parts for index in part)
        if "exact" in sampler:
            assert sorted(times.elements()) == [*range(SAMPLES)]
        elif "dropping" in sampler:
            assert sorted(times.elements()) == [*range(SAMPLES - spare)]
        else:
            assert sorted(times) == [*range(SAMPLES)]
            assert times.total() == SAMPLES + WORLD - spare
            assert set(parts[0]).isdisjoint(parts[1]) or max(times.values()) == 2


def test_losses_of_both_ranks_are_those_of_torchs_loader(ranks: list[Any]) -> None:
    for backend in NAMES:
        if backend != "threads":  # whose workers draw other random numbers
            for rank in ranks:
                assert rank["losses"][backend] == rank["losses"]["torch"]
            assert ranks[0]["losses"][backend] != ranks[1]["losses"][backend]


def test_a_data_pipe_is_shared_out_among_ranks_and_workers(ranks: list[Any]) -> None:
    """The seed that shuffles it is the same on all ranks, although each has its own generator."""
    for backend in NAMES:
        for epoch in range(EPOCHS):
            parts = [rank["pipes"][backend][epoch] for rank in ranks]
            assert parts == [rank["pipes"]["torch"][epoch] for rank in ranks]
            assert sorted(index for part in parts for index in part) == [*range(SAMPLES)]
