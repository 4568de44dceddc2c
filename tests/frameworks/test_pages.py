"""The pages about frameworks: each shows a part of a file that runs, and versions are those pinned."""

from __future__ import annotations

import configparser
import importlib.util
import re
from pathlib import Path

import pytest
from support.excerpts import is_part
from support.programs import python

ROOT = Path(__file__).parent.parent.parent
PAGES = ROOT / "docs" / "frameworks"
EXAMPLES = ROOT / "examples" / "frameworks"

FRAMEWORKS = {
    "accelerate": "accelerate",
    "datasets": "datasets",
    "distributed": "torch",
    "ignite": "ignite",
    "lightning": "lightning",
    "monai": "monai",
    "pyg": "torch_geometric",
    "torchdata": "torchdata",
    "trainer": "transformers",
    "webdataset": "webdataset",
}
"""The page, and the module without which its example can't run."""

NAMES = sorted(page.stem for page in PAGES.glob("*.md") if page.name != "README.md")


PIPELINES = ("accelerate", "ignite", "lightning", "trainer")
"""Pages of frameworks that hold a loader: these have a second example, with a pipeline."""

SHOWN = [("train", name) for name in NAMES] + [("pipeline", name) for name in PIPELINES]


def example_of(page: str, kind: str = "train") -> Path:
    return EXAMPLES / f"{kind}_with_{page}.py"


def test_every_page_has_its_example_and_every_example_its_page() -> None:
    assert {example_of(name, kind).name for kind, name in SHOWN} == {
        path.name for path in EXAMPLES.glob("*.py")
    }
    assert set(NAMES) <= set(FRAMEWORKS)


@pytest.mark.parametrize(("kind", "page"), SHOWN)
def test_the_page_shows_a_part_of_the_example_first_and_that_of_pipelines_in_its_section(
    kind: str, page: str
) -> None:
    text = (PAGES / f"{page}.md").read_text()
    if kind == "pipeline":
        _, heading, text = text.partition("\n## Pipelines\n")
        assert heading, "the page has no section for pipelines"
    block = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert block is not None, "the page shows no code"
    assert is_part(block[1], example_of(page, kind).read_text()), "not in the example"
    compile(block[1], page, "exec")
    assert 4 <= sum(map(bool, block[1].splitlines())) <= 30
    assert f"(../../examples/frameworks/{example_of(page, kind).name}):" in text[: block.start()]


RUN_ALL = """if True:
    import runpy, sys
    for script in sys.argv[1:]:
        runpy.run_path(script, run_name="__main__")
        print("-- end of", script)
"""
"""Both examples of a page run in one process: most of their time is the import of the framework."""


@pytest.mark.frameworks
@pytest.mark.parametrize("page", NAMES)
def test_the_examples_run_as_scripts(page: str, tmp_path: Path) -> None:
    """Run them in an empty folder without a network; no warning is raised."""
    module = FRAMEWORKS[page]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {module}: pip install -c constraints.txt -e '.[frameworks]'")
    scripts = [example_of(name, kind) for kind, name in SHOWN if name == page]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = python("-c", RUN_ALL, *scripts, cwd=tmp_path, **offline)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    for script in scripts:
        shown, end, printed = printed.partition(f"-- end of {script}\n")
        assert shown.strip(), f"{script.name} printed nothing"
        assert end
    assert "Traceback" not in done.stderr, done.stderr
    names = "|".join(script.name for script in scripts)
    ours = rf"(hybridloader/\S+|{names}):\d+: \w*Warning"
    assert not re.search(ours, done.stderr), done.stderr


# -- versions --------------------------------------------------------------------------------------


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_versions_of_the_table_are_those_pinned_and_it_has_all_of_the_extra() -> None:
    pins = {
        _normal(name): version
        for name, _, version in (
            line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines()
        )
        if version
    }
    lines = (PAGES / "README.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| \[", line)]
    named = []
    for row in rows:
        for package, version in re.findall(r"`([\w.-]+)` ([\d.]+)", row[1]):
            assert pins.get(_normal(package)) == version, package
            named.append(_normal(package))
    pages = {page for row in rows for page in re.findall(r"\]\((\w+)\.md\)", row[0])}
    assert pages == set(NAMES)
    assert len(named) == len(set(named)) >= len(pages)
    setup = configparser.RawConfigParser()
    setup.read(ROOT / "setup.cfg")
    for package in setup["options.extras_require"]["frameworks"].split():
        if package not in ("%(test)s", "ipykernel", "nbclient"):  # the last two run notebooks
            assert f"`{package}` " in "\n".join(lines), package
