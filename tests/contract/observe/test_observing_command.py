"""What `hybridloader run` writes of the loaders of an unchanged script."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import BAD_INPUT, main
from support.programs import python
from support.traces import ReadTrace

import hybridloader

SCRIPT = """
import sys
assert "torch" not in sys.modules
import torch

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(range(100), 2, num_workers=1)
    for epoch in range(2):
        print("epoch", epoch, len(list(loader)))
    print("done", file=sys.stderr)
    sys.exit(3)
"""


def run(folder: Path, *options: str) -> list[str]:
    """Lines that the command writes behind those of the script."""
    (folder / "train.py").write_text(SCRIPT)
    command = ("-m", "hybridloader", "run", "--backend=threads", *options, "train.py")
    done = python(*command, cwd=folder, RANK="3")  # as torchrun sets it
    assert (done.returncode, done.stdout) == (3, "epoch 0 50\nepoch 1 50\n"), done.stderr
    first, *lines = done.stderr.splitlines()
    assert first == "done"
    return lines


def test_statistics_and_a_trace(tmp_path: Path) -> None:
    first, header, *_ = run(tmp_path, "--stats", "--trace", "run-$RANK.json.gz")
    assert first == "hybridloader: DataLoader:"
    assert header.split()[:4] == ["stage", "where", "items", "busy"]
    trace = ReadTrace(tmp_path / "run-3.json.gz")
    assert trace.named("next()")
    assert trace.named("task")


@pytest.mark.parametrize(("file", "says"), [("none/run.json", "can't be written"), ("a", ".json")])
def test_a_trace_that_cannot_be_written_is_refused(
    file: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    try:
        code = main(["run", "--trace", str(tmp_path / file), str(tmp_path / "train.py")])
    finally:
        hybridloader.uninstall()
    assert code == BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
