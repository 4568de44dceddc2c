"""The page about migrating: its code runs, its commands run, its table of ways leads somewhere."""

from __future__ import annotations

import doctest
import importlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.platforms import PACKAGE
from torch.utils.data import DataLoader as TorchLoader

import hybridloader
from hybridloader import DataLoader

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "migrating.md"
TEXT = PAGE.read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    hybridloader.uninstall()


def test_every_block_of_the_page_runs() -> None:
    names: dict[str, Any] = {"__name__": "migrating", "dataset": range(8)}
    out = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False)
    for kind, block in BLOCK.findall(TEXT):
        if kind == "python":
            exec(compile(block, PAGE.name, "exec"), names)
        elif kind == "pycon":
            example = doctest.DocTestParser().get_doctest(block, names, PAGE.name, None, None)
            runner.run(example, out=out.write, clear_globs=False)
            names.update(example.globs)
    assert runner.failures == 0, out.getvalue()
    assert runner.tries >= 6
    assert sorted(i for batch in names["loader"] for i in batch.tolist()) == list(range(8))
    assert names["DataLoader"] is hybridloader.DataLoader
    assert not names["installed"].active


def test_the_first_command_of_the_page_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv)\n")
    (block,) = (block for kind, block in BLOCK.findall(TEXT) if kind == "sh")
    command = shlex.split(block.splitlines()[0])
    done = subprocess.run(
        [sys.executable, *command[1:]],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PACKAGE},
    )
    assert (done.stdout, done.stderr) == ("['train.py', '--epochs', '3']\n", "")


def test_the_page_names_every_keyword() -> None:
    """`device` has a page of its own."""
    ours, torchs = (inspect.signature(kind).parameters for kind in (DataLoader, TorchLoader))
    for name in ours.keys() - torchs.keys() - {"backend", "device"}:
        assert f"`{name}" in TEXT


@pytest.mark.parametrize("module", ["compat.install", "compat.from_torch"])
def test_examples_in_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"hybridloader.{module}"))
    assert result.attempted
    assert not result.failed


def test_what_the_page_says_of_a_dead_worker_and_of_no_prefetching_is_so() -> None:
    assert issubclass(hybridloader.WorkerDied, RuntimeError)
    with pytest.raises(ValueError, match="prefetch_factor"):
        hybridloader.DataLoader(range(2), num_workers=1, prefetch_factor=0)  # type: ignore[arg-type]
