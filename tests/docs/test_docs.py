"""The documents: their examples run, what they point to exists, and they stand alone."""

from __future__ import annotations

import configparser
import doctest
import importlib.util
import json
import math
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.excerpts import is_part
from support.failing_datasets import Samples

import hybridloader
from hybridloader import engine
from hybridloader.testing import BackendContract

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


tested = load(ROOT / "tests" / "tested.py")


sys.path.append(str(ROOT / "examples"))  # fresh processes import the module
pool_backend = load(ROOT / "examples" / "pool_backend.py")


class TestWorkedExample(BackendContract):
    """The backend that docs/backends.md shows."""

    backend = pool_backend.Pool()


def test_the_worked_example_serves_a_loader_and_a_pipeline() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10))
    loader = hybridloader.DataLoader(data, 3, num_workers=2, backend=pool_backend.Pool())
    for _ in range(2):
        assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    fresh = hybridloader.DataLoader(data, 5, num_workers=1, backend=pool_backend.Pool("spawn"))
    assert [batch.tolist() for (batch,) in fresh] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    # Results of a stage of ours are not sent on unopened to one that does not say that it takes them.
    pipe = hybridloader.Pipeline.from_iterable(range(20)).map(abs, backend="fork")
    with pipe.map(math.sqrt, backend=pool_backend.Pool()).run() as run:
        assert list(run) == [math.sqrt(i) for i in range(20)]


def test_a_worker_of_the_worked_example_that_dies_is_reported_and_replaced(tmp_path: Path) -> None:
    def fetch(index: int) -> int:
        if index == 5 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os._exit(3)
        return index

    items = Samples(fetch)
    given = {"batch_size": 2, "num_workers": 2, "backend": pool_backend.Pool()}
    with pytest.raises(hybridloader.WorkerDied, match="exited with code 3"):
        list(hybridloader.DataLoader(items, **given))
    (tmp_path / "died").unlink()
    loader = hybridloader.DataLoader(items, **given, on_worker_death="restart")
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_worked_example_is_short_and_imports_one_module_of_ours() -> None:
    source = (ROOT / "examples" / "pool_backend.py").read_text()
    assert len(source.splitlines()) < 100
    found = {line for line in source.splitlines() if "import" in line and "hybridloader" in line}
    assert found == {"from hybridloader import engine"}


def test_the_page_names_every_method_of_a_crew_and_all_that_a_backend_says_of_itself() -> None:
    page = (ROOT / "docs" / "backends.md").read_text()
    authors = page[page.index("## Writing one") :]
    for kind in (engine.Backend, engine.Crew):
        public = {*vars(kind), *vars(kind)["__annotations__"]}
        for name in {name for name in public if not name.startswith("_")}:
            assert re.search(rf"\b{name}\b", authors), f"{kind.__name__}.{name}"


def test_the_page_shows_a_part_of_the_worked_example() -> None:
    _, _, page = (
        (ROOT / "docs" / "backends.md").read_text().partition("(../examples/pool_backend.py)")
    )
    block = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    assert is_part(block[1], (ROOT / "examples" / "pool_backend.py").read_text())
    compile(block[1], "backends.md", "exec")


def test_the_picture_is_the_one_that_its_script_draws() -> None:
    overview = load(ROOT / ".ci" / "site" / "overview.py")
    assert overview.draw() == overview.PICTURE.read_text(encoding="utf-8")


def test_the_readme_is_short() -> None:
    before, _, rest = (ROOT / "README.md").read_text().partition(tested.BEGIN)
    written = before + rest.partition(tested.END)[2]  # without the tables that scripts write
    written = re.sub(
        r"<!-- benchmarks:begin.*?<!-- benchmarks:end \w+ -->\n", "", written, flags=re.S
    )
    assert len(written.splitlines()) <= 110


@pytest.mark.classes
def test_the_examples_in_the_readme_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    (tmp_path / "photos").mkdir()
    for number in range(3):
        Image.new("RGB", (80, 60), (number, 0, 0)).save(tmp_path / "photos" / f"{number}.jpg")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    loader, pipeline = ({"__name__": "readme"} for _ in range(2))
    for block, names in zip(blocks, (loader, pipeline), strict=True):
        exec(compile(block, "README.md", "exec"), names)
    assert loader["images"].shape == (999 % 64, 3, 32, 32)
    assert pipeline["images"].shape == (3, 64, 64, 3)
    assert "your loop" in capsys.readouterr().out


def test_links_lead_somewhere_and_pages_stand_alone() -> None:
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
        assert "shared/" not in text.replace("/dev/shm", ""), page.name


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: those of its headings, as GitHub makes them, and explicit ones."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
    return made | set(re.findall(r'<a id="([\w-]+)">', text))


def test_links_to_headings_find_them() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text()):
            there = page.parent / target if target else page
            assert anchor in anchors(there), f"{page.name}: {target}#{anchor}"


def test_titles_in_the_navigation_are_those_of_pages() -> None:
    """Check that only two entries have a title beside that of their page, which mkdocs takes."""
    yaml = pytest.importorskip("yaml")  # it is missing without a GIL, and under Wine
    entries = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = []
    while entries:
        entry = entries.pop()
        if isinstance(entry, str):
            pages.append(entry)
            continue
        ((title, below),) = entry.items()
        if isinstance(below, list):
            entries += below
        else:
            assert title in ("Home", "Troubleshooting")
            pages.append(below)
    assert len(pages) == len({*pages}) > 60
    shown = {path.relative_to(ROOT / "docs").as_posix() for path in PAGES if path.parent != ROOT}
    assert shown - {*pages} == {"decisions.md"}


def test_the_files_that_pages_name_are_there() -> None:
    roots = (ROOT, ROOT / "hybridloader")
    for page in sorted((ROOT / "docs").rglob("*.md")):
        named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text()))
        assert len(named) > 9 or page.name != "design.md"
        missing = [name for name in named if not any((root / name).exists() for root in roots)]
        assert not missing, page.name


TESTED = (
    "loader/dataloader.py",
    "testing.py",
    "compat/torch_loaders.py",
    "sampling/*",
    "sources/*",
)
"""Modules whose docstrings have examples that run by themselves."""

EXAMPLES = [
    path.relative_to(ROOT).with_suffix("")
    for pattern in TESTED
    for path in sorted((ROOT / "hybridloader").glob(pattern))
    if path.suffix == ".py" and ">>>" in path.read_text()
]


@pytest.mark.parametrize("path", EXAMPLES, ids=str)
def test_examples_in_docstrings_run(path: Path) -> None:
    if path.name == "parquet":
        pytest.importorskip("pyarrow")
    result = doctest.testmod(importlib.import_module(".".join(path.parts)))
    assert result.attempted
    assert not result.failed


def test_the_table_of_systems_is_that_of_the_records() -> None:
    records = json.loads(tested.RECORDS.read_text())
    assert tested.BEGIN + tested.table(records) + tested.END in (ROOT / "README.md").read_text()


def test_install_lines_work_without_a_registry() -> None:
    """Check that only the page of installation names the package as a registry would have it."""
    sources = [
        path
        for folder in ("hybridloader", "backends", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    extras = re.compile(r"install ['\"]?hybridloader\b|['\"]hybridloader\[|-e ['\"]?\.\[(\w+)\]")
    found = {path: extras.findall(path.read_text()) for path in [*PAGES, *sources]}
    del found[ROOT / "RELEASING.md"]  # of a release, by its name
    assert found.pop(ROOT / "docs" / "installation.md").count("") == 1
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for path, names in found.items():
        assert {*names} <= {*config["options.extras_require"]}, path.name
