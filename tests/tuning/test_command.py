"""``hybridloader tune SCRIPT``: the first loader or pipeline with enough results is tuned; then the
script ends."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from support.command import main
from support.manual_clock import Clock
from support.tuned_subject import FirstLoader, TunedEnd, choosing

from hybridloader import DataLoader, Pipeline, PipelineLoader

SCRIPT = """
import sys
import torch

print(sys.argv[1:])
few = torch.utils.data.DataLoader(range(8), 4)
list(few)
loader = torch.utils.data.DataLoader(range(1000), 4)
for batch in loader:
    pass
print("not reached")
"""


def command(script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "hybridloader", "tune", "--seconds", "0.3", *words]
    line.insert(-1 if words[-1:] == ("--x",) else len(line), str(script))
    return subprocess.run(line, capture_output=True, text=True, timeout=100)


def test_the_table_and_the_code_are_printed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = command(script, "--x")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("['--x']\nplan ")
    assert "chosen" in done.stdout
    assert "hybridloader.DataLoader(..., num_workers=" in done.stdout
    assert "not reached" not in done.stdout


PIPELINE = """
import time
from hybridloader import Pipeline

def wait(number):
    time.sleep(0.001)
    return number

few = Pipeline.from_dataset(range(7)).map(str)
list(few)
numbers = Pipeline.from_dataset(range(1000))
pipe = Pipeline.zip(numbers, numbers.map(str)).map(wait)
for item in pipe:
    time.sleep(0.01)
print("not reached")
"""


def test_the_steps_of_a_pipeline_are_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PIPELINE)
    done = command(script, "--keep-up")
    assert (done.returncode, done.stderr) == (0, "")
    assert "chosen" in done.stdout
    assert "keeps up with" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("map(wait): ")
    assert "not reached" not in done.stdout


PROBLEMS = {
    "Pipeline.from_dataset(range(20))": "found no step of this pipeline to place",
    "Pipeline.from_iterable(iter(range(20))).map(str)": "can be read only once",
    "Pipeline.from_dataset(range(7)).map(str)": "ended before a DataLoader had 8 batches",
}


@pytest.mark.parametrize("pipeline", PROBLEMS)
def test_a_pipeline_that_can_t_be_tuned_is_an_error_in_a_line(
    pipeline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"from hybridloader import Pipeline\nfor item in {pipeline}: pass\n")
    try:
        code = main(["tune", "--seconds", "0.3", str(script)])
    except SystemExit as end:
        code = end.code
    assert code != 0
    (line,) = (str(code) + capsys.readouterr().err).splitlines()
    assert PROBLEMS[pipeline] in line


KINDS = {
    "iter": iter,
    "run": lambda pipe: pipe.run(seed=1),
    "epochs": lambda pipe: itertools.chain.from_iterable(pipe.epochs(1)),
    "loader": lambda pipe: iter(PipelineLoader(pipe)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", [None, "auto"])
def test_a_pipeline_is_found_however_it_is_run(
    kind: str, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "SECONDS", 0.2)
    clock, found = Clock(), list[tuple[Any, float]]()
    cls = type(Pipeline.from_iterable(()).run())
    method = vars(cls)["__next__"]
    made = list[Pipeline]()

    def script() -> None:
        made.append(Pipeline.from_dataset(range(20)).map(str, backend=backend))
        for _ in KINDS[kind](made[0]):
            clock.now += 0.25

    with (
        pytest.raises(TunedEnd),
        FirstLoader(lambda *one: found.append(one), enough=3, clock=clock),
    ):
        script()
    (pipe,) = made
    assert [round(loop, 3) for _, loop in found] == [0.25]
    assert found[0][0] is pipe.settled()
    assert vars(cls)["__next__"] is method


class OfPipeline(torch.utils.data.IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        return iter(Pipeline.from_dataset(range(40)).map(str))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pipeline_within_a_loader_is_the_loader_s(workers: int) -> None:
    found = list[tuple[Any, float]]()
    loader = torch.utils.data.DataLoader(OfPipeline(), 8, num_workers=workers)
    with pytest.raises(TunedEnd), FirstLoader(lambda *one: found.append(one), enough=3):
        list(loader)
    assert [one for one, _ in found] == [loader]


def test_what_another_thread_takes_does_not_count() -> None:
    found, taken = list[tuple[Any, float]](), list[Any]()
    pipe = Pipeline.from_dataset(range(40)).map(str)
    with FirstLoader(lambda *one: found.append(one), enough=3):
        for source in (pipe, torch.utils.data.DataLoader(range(40))):  # type: ignore[arg-type]
            thread = threading.Thread(target=lambda source=source: taken.extend(source))
            thread.start()
            thread.join()
    assert (len(found), len(taken)) == (0, 80)


@pytest.mark.parametrize("of", [DataLoader, torch.utils.data.DataLoader])
def test_the_loop_is_timed_without_waits(of: type[torch.utils.data.DataLoader[int]]) -> None:
    clock, found = Clock(), list[tuple[Any, float]]()
    method = vars(torch.utils.data.DataLoader)["__iter__"]

    class Waits(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> int:
            clock.now += 5.0
            return index

    def script() -> None:
        for _ in of(Waits(), 2):
            clock.now += 0.25

    with (
        pytest.raises(TunedEnd),
        FirstLoader(lambda *one: found.append(one), enough=3, clock=clock),
    ):
        script()
    assert [round(loop, 3) for _, loop in found] == [0.25]
    assert vars(torch.utils.data.DataLoader)["__iter__"] is method
