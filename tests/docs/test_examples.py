"""Pages about pipelines and their examples: all code runs, and all that they list exists."""

from __future__ import annotations

import inspect
import math
import re
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from support.excerpts import BLOCK, is_part, run_blocks
from support.photographs import CLASSES, photographs
from support.programs import output

import hybridloader
from hybridloader import Pipeline

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pipelines.md"
EXAMPLES = ROOT / "examples"

CROPS = 4
"""Images of each photograph; all 40 make two batches."""


@pytest.fixture
def taken_for_granted(tmp_path: Path) -> dict[str, Any]:
    """Names that the page uses without defining them."""
    text = tmp_path / "words.txt"
    text.write_text("one two\nthree\n")
    return {"__name__": "__main__", "paths": [str(text)] * 2}


@pytest.mark.classes
def test_every_block_of_the_page_runs(taken_for_granted: dict[str, Any]) -> None:
    names = taken_for_granted
    try:
        assert run_blocks(PAGE.read_text(), names) > 10
        assert sum(len(labels) for _, labels in names["pipe"]) == 10
        assert list(names["words"]) == [["one", "two"]] * 2 + [["three"]] * 2
        assert list(names["rows"]) == ["a", "b"]
    finally:
        names.clear()  # a kept iterator keeps a descriptor for each worker process, closed or not


def test_the_page_names_every_public_method() -> None:
    names = {*vars(Pipeline), *vars(Pipeline)} - {"operators"}
    public = {name for name in names if not name.startswith("_")}
    text = PAGE.read_text()
    heads = "\n".join(line.split(" | ")[0] for line in text.splitlines() if line.startswith("| "))
    missing = {name for name in public if not re.search(rf"\.{name}[(`]", heads)}
    assert not missing
    table = text[text.index("| step | result") : text.index("Methods and functions that")]
    named = re.findall(r"^\| `\.(\w+)\(", table, re.MULTILINE)
    assert len(named) == len(set(named)) > 20
    assert all(isinstance(getattr(Pipeline, name), FunctionType) for name in named)


LENGTHS = {
    ".map(f)": lambda pipe: pipe.map(abs),
    ".filter(f)": lambda pipe: pipe.filter(abs),
    ".flat_map(f)": lambda pipe: pipe.flat_map(range),
    ".batch(batch_size)": lambda pipe: pipe.batch(2),
    ".batch_by(cost, max_cost)": lambda pipe: pipe.batch_by(abs, 9),
    ".bucket_by(key, batch_size)": lambda pipe: pipe.bucket_by(abs, 2),
    ".pack(row_length)": lambda pipe: pipe.pack(4),
    ".shuffle(buffer_size)": lambda pipe: pipe.shuffle(3),
    ".take(count)": lambda pipe: pipe.take(3),
    ".skip(count)": lambda pipe: pipe.skip(3),
    ".enumerate(start=0)": lambda pipe: pipe.enumerate(),
    ".repeat(times)": lambda pipe: pipe.repeat(3),
    ".shard(num_replicas, rank)": lambda pipe: pipe.shard(2, 0),
    ".cache()": lambda pipe: pipe.cache(),
    ".prefetch(count)": lambda pipe: pipe.prefetch(3),
    ".zip(other, ...)": lambda pipe: pipe.zip(pipe),
    ".concat(other, ...)": lambda pipe: pipe.concat(pipe),
    ".interleave(other, ...)": lambda pipe: pipe.interleave(pipe),
    ".mix(other, ...)": lambda pipe: pipe.mix(pipe),
    ".pin_memory()": lambda pipe: pipe.pin_memory(),
    ".to(device)": lambda pipe: pipe.to("cuda"),
}
WORDS = {
    "n": 10,
    "?": None,
    "n / batch_size": 5,
    "n / num_replicas": 5,
    "at most count": 3,
    "n - count": 7,
    "n * times": 30,
    "that of each": 10,
    "the sum": 20,
    "the sum, or ?": 20,
    "n each": 10,
}


def test_the_lengths_in_the_table_are_right() -> None:
    cells = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines()]
    shown = {row[0].strip("`"): row[2] for row in cells if len(row) == 4 and row[0][:2] == "`."}
    assert LENGTHS.keys() <= shown.keys()
    pipe = Pipeline.from_dataset(range(10))
    for method, made in LENGTHS.items():
        assert made(pipe).length == WORDS[shown[method]], method


def test_the_page_names_every_keyword_of_a_stage() -> None:
    text = PAGE.read_text()
    named = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert named == inspect.signature(Pipeline.map).parameters.keys() - {"self", "function", "name"}


def test_the_operator_of_the_page_is_a_part_of_the_example() -> None:
    _, _, page = PAGE.read_text().partition("(../examples/own_operator.py)")
    block = BLOCK.search(page)
    assert block is not None
    assert is_part(block[2], (EXAMPLES / "own_operator.py").read_text())


@pytest.fixture
def windows() -> Any:
    names: dict[str, Any] = {"__name__": "own_operator"}
    source = (EXAMPLES / "own_operator.py").read_text()
    sys.modules["own_operator"] = module = type(sys)("own_operator")  # dataclasses look there
    vars(module).update(names)
    exec(compile(source, "own_operator.py", "exec"), vars(module))
    yield vars(module)["Windows"]
    del sys.modules["own_operator"]


@pytest.mark.parametrize("step", [1, 3, 6])
def test_the_example_operator_gives_windows_and_knows_how_many(windows: Any, step: int) -> None:
    for count in (0, 3, 4, 5, 10):
        pipe = Pipeline.from_dataset(range(count)).apply(windows(4, step))
        wanted = [tuple(range(k, k + 4)) for k in range(0, count - 3, step)]
        assert list(pipe) == list(pipe) == wanted
        assert len(pipe) == len(wanted)
        assert Pipeline.from_iterable(lambda: range(9)).apply(windows(4, step)).length is None
        assert pipe.repeat().length == (math.inf if wanted else 0)
    with pytest.raises(ValueError, match="windows: size must be at least 1, not 0"):
        windows(0)


def test_own_operator_runs_as_a_script() -> None:
    assert output(EXAMPLES / "own_operator.py") == "3 clips: 0-1-2-3 3-4-5-6 6-7-8-9\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs(tmp_path_factory.mktemp("photographs"), each=CROPS)


def test_hybrid_images_runs_as_a_script(folder: Path) -> None:
    shown = output(EXAMPLES / "hybrid_images.py", str(folder), "--images", "36")
    plan, summary, stats = shown.strip().split("\n\n")
    assert re.search(r"^map\(Augment\) +spawn x 2 +36$", plan, re.MULTILINE)
    assert summary.startswith("36 images in ")
    rows = dict(re.findall(r"^(\S+(?: loop)?) +\w+(?: x \d)? +(\d+) ", stats, re.MULTILINE))
    items = {"map(read)": "36", "map(decode)": "36", "map(Augment)": "36", "your loop": "2"}
    assert items.items() <= rows.items()


@pytest.mark.full
def test_hybrid_images_takes_all(folder: Path) -> None:
    shown = output(EXAMPLES / "hybrid_images.py", str(folder))
    assert f"{CROPS * CLASSES} images in " in shown


def test_the_table_of_the_page_has_the_stages_of_the_example() -> None:
    text = PAGE.read_text()
    table = text[text.index("stage ", text.index("## Statistics")) :].split("```")[0]
    names = re.findall(r"^(map\(\w+\)|batch\(32\)|your loop) ", table, re.MULTILINE)
    assert names == ["map(read)", "map(decode)", "map(Augment)", "batch(32)", "your loop"]


def test_the_pipelines_of_the_comparison_can_be_described() -> None:
    """Check that the page's blocks are pipelines that can be made and laid out; nothing is run."""
    text = (ROOT / "docs" / "comparison.md").read_text()
    ours = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "    Pipeline." in b]
    assert len(ours) == 4
    for block in ours:
        names: dict[str, Any] = {"Pipeline": hybridloader.Pipeline}
        for one in ("load", "augment", "collate", "members"):
            names[one] = lambda item: item
        for one in ("dataset", "files", "paths", "shards"):
            names[one] = ["a", "b", "c"]
        described = block.split("with iter(pipe)")[0]
        exec(compile(described, "comparison.md", "exec"), names)
        assert "pipe" in names
        assert str(names["pipe"])
