"""The page about sources, and that for users of webdataset: their examples run."""

from __future__ import annotations

import doctest
import io
import re
import shlex
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.archives import tar_bytes

from hybridloader.cli import _parser as parser

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytest.importorskip("pyarrow")


def members(first: int) -> Any:
    for number in range(first, first + 3):
        yield f"{number}.jpg", b"image"
        yield f"{number}.cls", b"1"


def decode(sample: tuple[bytes, bytes]) -> tuple[int, int]:
    image, label = sample
    return len(image), int(label)


@pytest.mark.classes
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_every_block_about_sources_runs(tmp_path: Path) -> None:
    text = (DOCS / "sources.md").read_text()
    for number in range(128):
        (tmp_path / f"train-{number:03d}.tar").write_bytes(tar_bytes(members(3 * number)))
    assert text.count('"s3://bucket/train-') == text.count('index="idx"') == 1
    text = text.replace("s3://bucket/", f"{tmp_path.as_posix()}/")
    text = text.replace('"idx"', repr(f"{tmp_path.as_posix()}/idx"))
    names: dict[str, Any] = {"__name__": "sources", "decode": decode}
    out = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False)
    for kind, block in BLOCK.findall(text):
        if kind == "python":
            exec(compile(block, "sources.md", "exec"), names)
            if "photos" in block:
                assert sum(len(lengths) for lengths, _ in names["loader"]) == 384
            continue
        example = doctest.DocTestParser().get_doctest(block, names, "sources.md", None, None)
        runner.run(example, out=out.write, clear_globs=False)
        names.update(example.globs)
    assert runner.failures == 0, out.getvalue()
    assert runner.tries >= 20

    path = tmp_path / "rows.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("create table rows (a)")
        database.execute("insert into rows values (7)")
    rows = names["Rows"](path)
    assert [len(rows), rows[0]] == [1, (7,)]
    rows.database.close()


@pytest.mark.parametrize("page", ["packing.md", "mixing.md"])
def test_every_block_about_packing_and_mixing_runs(page: str) -> None:
    names: dict[str, Any] = {}
    out = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False)
    for kind, block in BLOCK.findall((DOCS / page).read_text()):
        if kind == "pycon":
            example = doctest.DocTestParser().get_doctest(block, names, page, None, None)
            runner.run(example, out=out.write, clear_globs=False)
            names.update(example.globs)
    assert runner.failures == 0, out.getvalue()
    assert runner.tries > 4


def test_the_commands_of_the_page_are_understood() -> None:
    commands = re.findall(r"^hybridloader (.*)$", (DOCS / "packing.md").read_text(), re.MULTILINE)
    assert [parser().parse_args(shlex.split(line)).command for line in commands] == [
        "write-shards",
        "index",
    ]


def test_the_block_for_users_of_webdataset_runs(tmp_path: Path) -> None:
    text = (DOCS / "comparison.md").read_text()
    block = next(b for kind, b in BLOCK.findall(text) if "Tar(urls" in b)
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes(members(0)))
    names: dict[str, Any] = {"urls": str(path), "decoded": decode}
    exec(compile(block.replace("num_workers=4", "num_workers=0"), "comparison.md", "exec"), names)
    assert sum(len(lengths) for lengths, _ in names["loader"]) == 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("remote_tar", "200: every sample once"),
        ("pack_text", "none of them padding"),
        # Five processes that import torch: 20 s.
        pytest.param("train_from_s3", "400: every sample once", marks=pytest.mark.full),
    ],
)
def test_the_examples_run(name: str, said: str) -> None:
    pytest.importorskip("aiohttp")
    if name == "train_from_s3":
        pytest.importorskip("s3fs")
        pytest.importorskip("moto")
    path = DOCS.parent / "examples" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert f"examples/{name}.py" in (DOCS / "sources.md").read_text()
