"""Reuse of batches by all loaders of a script, for the headroom of its loop."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from support.manual_clock import Clock
from support.platforms import PACKAGE

import hybridloader
from hybridloader import DataLoader
from hybridloader.observe.headroom_trials import KEPT, KeptBatches, Reuse

THREADS: dict[str, Any] = {"backend": "threads", "num_workers": 2}


class Counting:
    """Samples that are counted."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index


def test_epochs_that_are_left_early_count_what_the_device_has_done() -> None:
    """A step takes 1 ms to launch and 20 ms on the device; the loop leaves each epoch by `break`."""
    clock, done = Clock(), [0.0]

    def wait() -> None:
        clock.now = max(clock.now, done[0])

    def step() -> None:
        clock.now += 0.001
        done[0] = max(done[0], clock.now) + 0.020

    kept = KeptBatches("DataLoader", 1000, clock, wait)
    for _ in range(3):
        kept.begin()
        for batch in range(60):
            if kept.enough:
                kept.again()
            else:
                clock.now += 0.030
                if kept.keep(batch):
                    kept.mark()
            step()
        wait()
        clock.now += 5.0
    assert kept.ready / kept.steps == pytest.approx(0.020, rel=0.1)


def test_times_are_those_of_the_loop_with_and_without() -> None:
    """Loading takes 3 s, a step 1 s on the host and 1 s more on the device, which works behind."""
    clock, behind = Clock(), [0.0]

    def wait() -> None:
        clock.now += behind[0]
        behind[0] = 0.0

    def step() -> None:
        clock.now += 1.0
        wait()  # what the step before has left
        behind[0] = 1.0

    kept = KeptBatches("DataLoader", 20, clock, wait)
    for _ in range(3):
        kept.begin()
        while not kept.enough:
            clock.now += 3.0
            behind[0] = 0.0
            kept.keep("batch")
            if kept.enough:
                clock.now += 50.0  # of closing
                kept.mark()
            step()
        while True:
            try:
                kept.again()
            except StopIteration:
                break
            step()
        clock.now += 500.0  # between the epochs
    assert (kept.loads, kept.warm) == (10, 4)
    assert kept.loading == pytest.approx(6 * 4.0)
    assert kept.steps == 11 + 20 + 20
    assert kept.ready == pytest.approx(kept.steps * 2.0, rel=0.02)
    assert "at most 2.0" in str(kept)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("ours", [True, False])
def test_most_batches_are_the_same_few(ours: bool, persistent: bool) -> None:
    data: Any = Counting(200)
    options: Any = {"persistent_workers": persistent, "num_workers": 2}
    stream = io.StringIO()
    with Reuse(stream) as reuse:
        assert Reuse.running() is reuse
        if ours:
            loader: Any = DataLoader(data, 2, backend="threads", **options)
            epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
        else:
            with hybridloader.install("threads"):
                loader = torch.utils.data.DataLoader(data, 2, **options)
                epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
    assert Reuse.running() is None
    assert [len(epoch) for epoch in epochs] == [100] * 3
    batches = [[2 * number, 2 * number + 1] for number in range(36)]
    assert epochs[0][:36] == batches
    rest = [batch for epoch in (epochs[0][36:], *epochs[1:]) for batch in epoch]
    assert {tuple(batch) for batch in rest} == {tuple(batch) for batch in batches[:KEPT]}
    assert max(data.asked) < 2 * (36 + 10), "with what was read ahead"
    line, warning = stream.getvalue().splitlines()
    assert line.startswith("hybridloader: DataLoader: ")
    assert "32 steps with loading, 265 on 4 batches." in line
    assert "discard the trained weights" in warning


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_loaders_that_cannot_load_as_ever() -> None:
    stream = io.StringIO()
    with Reuse(stream):
        assert len(list(DataLoader(Stream()))) == 6
        assert len(list(DataLoader(range(3), **THREADS))) == 3  # type: ignore[arg-type]
        early = DataLoader(range(100), **THREADS)  # type: ignore[arg-type]
        for _ in range(2):
            for batch, _ in zip(early, range(5), strict=False):
                assert batch < 5
    assert stream.getvalue().splitlines() == [
        "hybridloader: DataLoader loaded all its batches, because it has no len().",
        "hybridloader: DataLoader 2 loaded all its batches, because no epoch had more than 3.",
        "hybridloader: DataLoader 3 loaded all its batches, because no epoch had more than 36.",
    ]


def test_the_shortest_loader_that_can() -> None:
    stream = io.StringIO()
    with Reuse(stream):
        assert [int(batch) for batch in DataLoader(range(4))] == [0, 1, 1, 0]  # type: ignore[arg-type]
    assert "1 steps with loading, 3 on 2 batches." in stream.getvalue()


def test_batches_go_with_their_loader() -> None:
    with Reuse(io.StringIO()) as reuse:
        for number in range(3):
            data: Any = [number] * 20
            assert {int(batch) for batch in DataLoader(data)} == {number}, "not those of another"
    assert len(reuse.loaders) == 3


SCRIPT = """
import torch
loader = torch.utils.data.DataLoader(range(100), 2, num_workers=1)
for epoch in range(2):
    print(len(list(loader)))
"""


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "hybridloader",
            "run",
            "--backend=threads",
            "--headroom",
            "train.py",
        ],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PACKAGE},
    )
    assert (done.returncode, done.stdout) == (0, "50\n50\n")
    told = done.stderr.splitlines()
    assert len(told) == 2
    assert "times as fast if loading cost nothing" in told[0]


def test_a_script_without_a_loader_is_reported() -> None:
    written = io.StringIO()
    with Reuse(written):
        pass
    assert written.getvalue() == (
        "hybridloader: no loop took batches of a DataLoader: no headroom\n"
    )
