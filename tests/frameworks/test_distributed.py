"""torch.distributed: two gloo ranks, each with its part, on every backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from one_rank import BACKENDS, EPOCHS, SAMPLERS, SAMPLES

import hybridloader

HERE = Path(__file__).parent
WORLD = 2
NAMES = [str(backend) for backend in BACKENDS]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank saw: one group for all tests, because torch takes seconds to import."""
    folder = tmp_path_factory.mktemp("group")
    root = Path(hybridloader.__file__).parent.parent
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    script = str(HERE / "one_rank.py")
    running = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(WORLD), str(folder)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        told = [rank.communicate(timeout=100)[1] for rank in running]
    finally:
        for rank in running:
            rank.kill()
            rank.wait()
    for rank, text in zip(running, told, strict=True):
        assert rank.returncode == 0, text
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_rank_gets_what_torchs_loader_gives_it(
    ranks: list[Any], sampler: str, backend: str
) -> None:
    for rank in ranks:
        assert rank["indices"][sampler][backend] == rank["indices"][sampler]["torch"]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_parts_are_disjoint_and_complete(ranks: list[Any], sampler: str) -> None:
    spare = SAMPLES % WORLD
    for backend in NAMES:
        for epoch in range(EPOCHS):
            parts = [rank["indices"][sampler][backend][epoch] for rank in ranks]
            times = Counter(index for part in parts for index in part)
            if "exact" in sampler:
                assert sorted(times.elements()) == [*range(SAMPLES)]
            elif "dropping" in sampler:
                assert sorted(times.elements()) == [*range(SAMPLES - spare)]
            else:
                assert sorted(times) == [*range(SAMPLES)]
                assert times.total() == SAMPLES + WORLD - spare
                assert set(parts[0]).isdisjoint(parts[1]) or max(times.values()) == 2


@pytest.mark.parametrize("sampler", ["torch's", "ours", "ours, exact"])
def test_set_epoch_makes_another_order(ranks: list[Any], sampler: str) -> None:
    for rank in ranks:
        first, second = rank["indices"][sampler]["threads"]
        assert first != second


@pytest.mark.parametrize("backend", [name for name in NAMES if name != "threads"])
def test_losses_of_both_ranks_are_those_of_torchs_loader(ranks: list[Any], backend: str) -> None:
    for rank in ranks:
        assert rank["losses"][backend] == rank["losses"]["torch"]
    assert ranks[0]["losses"][backend] != ranks[1]["losses"][backend]


@pytest.mark.parametrize("backend", NAMES)
def test_a_data_pipe_is_shared_out_among_ranks_and_workers(ranks: list[Any], backend: str) -> None:
    """The seed that shuffles it is the same on all ranks, although each has its own generator."""
    for epoch in range(EPOCHS):
        parts = [rank["pipes"][backend][epoch] for rank in ranks]
        assert parts == [rank["pipes"]["torch"][epoch] for rank in ranks]
        assert sorted(index for part in parts for index in part) == [*range(SAMPLES)]
