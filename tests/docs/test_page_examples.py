"""Pages whose examples run: all blocks of a page, or of a section, in turn."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.archives import tar_bytes
from support.command import main
from support.excerpts import run_blocks
from support.fake_accelerator import FakeAccelerator, taken_for_current
from support.photographs import photographs
from support.programs import output, python
from support.recordings import free_cores_are_recorded
from torch.utils.data import DataLoader as TorchLoader

import hybridloader
from hybridloader import DataLoader

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text()


def test_devices() -> None:
    """As far as it needs no GPU: the loader and the pipeline have their batches on the device."""
    fake = FakeAccelerator("cuda:0", manual=False)
    text = text_of("devices").replace("torch.cuda.is_available()", "True")
    blocks = re.findall(r"^```python\n.*?^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    with taken_for_current(fake):
        run_blocks("\n".join(blocks[:2]), names)
        assert fake.holds(names["images"])
        assert all(fake.holds(batch) for batch in names["pipe"])


def test_faults_about_bad_samples_and_the_table_of_errors() -> None:
    text = text_of("faults")
    section = text[text.index("## Bad samples") :].split("\n## ")[0]
    assert run_blocks(section, {"__name__": "faults"}) >= 6
    table = text[text.index("\n## Errors") :].split("\n## ")[1]
    listed: dict[str, set[str]] = {}
    for row in re.findall(r"^\| (`.*)", table, re.MULTILINE):
        names, bases = (re.findall(r"`(\w+)`", cell) for cell in row.split(" | ")[:2])
        for number, name in enumerate(names):
            listed[name] = set(bases if len(names) == 1 else bases[number : number + 1])
    for name, bases in listed.items():
        found = getattr(hybridloader.errors, name)
        assert issubclass(found, hybridloader.HybridLoaderError)
        assert bases <= {base.__name__ for base in found.__mro__}, name
    errors = {name for name, kind in vars(hybridloader.errors).items() if isinstance(kind, type)}
    assert listed.keys() == errors - {"HybridLoaderError"}


def test_packing_and_mixing() -> None:
    assert run_blocks(text_of("packing"), {}, kinds="pycon") > 4
    run_blocks(text_of("mixing"), {})  # it has an assert


# -- migrating -----------------------------------------------------------------------------------------


@pytest.fixture
def _undone() -> Iterator[None]:
    yield
    hybridloader.uninstall()


@pytest.mark.usefixtures("_undone")
def test_migrating() -> None:
    names: dict[str, Any] = {"__name__": "migrating", "dataset": range(8)}
    assert run_blocks(text_of("migrating"), names) >= 6
    assert sorted(i for batch in names["loader"] for i in batch.tolist()) == list(range(8))
    assert names["DataLoader"] is hybridloader.DataLoader
    assert not names["installed"].active
    ours, torchs = (inspect.signature(kind).parameters for kind in (DataLoader, TorchLoader))
    for name in ours.keys() - torchs.keys() - {"backend", "device"}:  # which have their pages
        assert f"`{name}" in text_of("migrating")
    # What it says of a dead worker, and of no prefetching:
    assert issubclass(hybridloader.WorkerDied, RuntimeError)
    with pytest.raises(ValueError, match="prefetch_factor"):
        DataLoader(range(2), num_workers=1, prefetch_factor=0)  # type: ignore[arg-type]


def test_the_first_command_of_migrating(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv)\n")
    (block,) = re.findall(r"^```sh\n(.*?)^```$", text_of("migrating"), re.MULTILINE | re.DOTALL)
    command = shlex.split(block.splitlines()[0])[1:]
    assert output(*command, cwd=tmp_path) == "['train.py', '--epochs', '3']\n"


# -- quickstart ----------------------------------------------------------------------------------------


@pytest.mark.classes
def test_quickstart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 batches come once each: 6, and 10 resumed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hybridloader, "tune", functools.partial(hybridloader.tune, seconds=3))
    names: dict[str, Any] = {"__name__": "__main__"}
    steps: list[int] = []

    def between(block: str) -> None:
        if "def step" in block:
            step = names["step"]
            names["step"] = lambda batch: (steps.append(len(batch[0])), step(batch))
        if "torch.save" in block:
            assert steps[-6:] == [32] * 6
            steps.clear()

    try:
        run_blocks(text_of("quickstart"), names, between=between)
        assert steps == [32] * 10
    finally:
        names.clear()  # a kept iterator keeps its workers
    printed = capsys.readouterr().out
    for text in (
        *("times as fast if loading cost nothing", "The bottleneck is ", "as it was"),
        "hybridloader.DataLoader(..., num_workers=",
    ):
        assert text in printed


# -- why is it slow ------------------------------------------------------------------------------------

SLOW = {
    "far away": ("stage", "DataLoader", "waits"),
    "in Python": ("stage", "DataLoader", "holds-gil"),
    "sampler": ("source", "sampler", None),
    "loop": ("loop", None, None),
}


@pytest.mark.full  # 32 s: each cause is a shorter test of tests/contract/observe
def test_the_example_is_slow_for_the_reasons_that_the_page_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    free_cores_are_recorded(monkeypatch)
    example: Any = importlib.import_module("why_slow")
    for name, slow, cured in example.cases(photographs(tmp_path, each=30)):
        verdict = slow.verdict
        if verdict.cause != "cores":  # its workers waited for one: the machine is busy
            assert (verdict.cause, verdict.stage, verdict.kind) == SLOW[name], str(slow)
        assert slow.items == cured.items


def test_the_page_shows_what_the_example_prints() -> None:
    for text in (*(f"\n{name}: " for name in SLOW), "examples/why_slow.py"):
        assert text in text_of("why-is-it-slow")


# -- sources -------------------------------------------------------------------------------------------


def members(first: int) -> Iterator[tuple[str, bytes]]:
    for number in range(first, first + 3):
        yield f"{number}.jpg", b"image"
        yield f"{number}.cls", b"1"


def decode(sample: tuple[bytes, bytes]) -> tuple[int, int]:
    image, label = sample
    return len(image), int(label)


@pytest.mark.classes
def test_sources_and_the_block_for_users_of_webdataset(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for number in range(128):
        (tmp_path / f"train-{number:03d}.tar").write_bytes(tar_bytes(members(3 * number)))
    text = text_of("sources")
    assert text.count('"s3://bucket/train-') == text.count('index="idx"') == 1
    text = text.replace("s3://bucket/", f"{tmp_path.as_posix()}/")
    text = text.replace('"idx"', repr(f"{tmp_path.as_posix()}/idx"))
    names: dict[str, Any] = {"__name__": "sources", "decode": decode}

    def between(block: str) -> None:
        if "photos" in block and "loader" in names:
            assert sum(len(lengths) for lengths, _ in names["loader"]) == 384

    assert run_blocks(text, names, between=between) >= 20
    path = tmp_path / "rows.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("create table rows (a)")
        database.execute("insert into rows values (7)")
    rows = names["Rows"](path)
    assert [len(rows), rows[0]] == [1, (7,)]
    rows.database.close()

    blocks = re.findall(r"^```python\n.*?^```$", text_of("comparison"), re.MULTILINE | re.DOTALL)
    block = next(block for block in blocks if "Tar(urls" in block)
    names = {"urls": str(tmp_path / "train-000.tar"), "decoded": decode}
    run_blocks(block.replace("num_workers=4", "num_workers=0"), names)
    assert sum(len(lengths) for lengths, _ in names["loader"]) == 3


def test_the_commands_of_packing_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine without these files they say so, and nothing of their options."""
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^hybridloader (.*)$", text_of("packing"), re.MULTILINE)
    assert [line.split()[0] for line in commands] == ["write-shards"]
    for line in commands:
        assert main(shlex.split(line.replace("s3://bucket", "none"))) != 0
        error = capsys.readouterr().err
        assert "photos" in error or "none/train" in error
        assert "usage" not in error


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("remote_tar", "200: every sample once"),
        ("pack_text", "none of them padding"),
        # Five processes that import torch: 20 s.
        pytest.param("train_from_s3", "400: every sample once", marks=pytest.mark.full),
    ],
)
def test_the_examples_of_sources(name: str, said: str) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("aiohttp")
    if name == "train_from_s3":
        pytest.importorskip("s3fs")
        pytest.importorskip("moto")
    done = python("-W", "error", ROOT / "examples" / f"{name}.py")
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert f"examples/{name}.py" in text_of("sources")
