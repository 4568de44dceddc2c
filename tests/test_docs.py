"""The documents: their examples run, what they point to exists, and they stand alone."""

from __future__ import annotations

import doctest
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import hybridloader
from hybridloader.testing import BackendContract

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


pool_backend = load(ROOT / "examples" / "pool_backend.py")


class TestWorkedExample(BackendContract):
    """The backend that docs/backends.md shows."""

    backend = pool_backend.Pool()


def test_the_worked_example_serves_a_loader_and_is_short() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10))
    loader = hybridloader.DataLoader(data, 3, num_workers=2, backend=pool_backend.Pool())
    for _ in range(2):
        assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    source = (ROOT / "examples" / "pool_backend.py").read_text()
    crew = source[source.index("class PoolCrew") :]
    assert len(crew.splitlines()) < 100


def test_the_worked_example_is_the_one_in_the_page() -> None:
    page = (ROOT / "docs" / "backends.md").read_text()
    assert (ROOT / "examples" / "pool_backend.py").read_text() in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere_and_the_page_stands_alone(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    assert "shared/" not in text.replace("/dev/shm", "")


def test_the_tables_in_the_design_page_are_those_of_the_scheduler() -> None:
    from hybridloader.scheduler import RUN_TABLE, WORK_TABLE

    page = (ROOT / "docs" / "design.md").read_text()
    for name, table in (("run", RUN_TABLE), ("worker", WORK_TABLE)):
        found: dict[tuple[str, str], str] = {}
        lines = iter(page.splitlines())
        head = next(line for line in lines if line.startswith(f"| {name} | "))
        events = [cell.strip() for cell in head.strip("|").split("|")][1:]
        next(lines)
        for line in lines:
            if not line.startswith("|"):
                break
            state, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            found |= {(state, e): c for e, c in zip(events, cells, strict=True) if c}
        assert found == {(state.value, e): to.value for (state, e), to in table.items()}


@pytest.mark.parametrize("module", ["dataloader", "testing.suite"])
def test_examples_in_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"hybridloader.{module}"))
    assert result.attempted
    assert not result.failed
