"""The citation, the workflows, and the packing of sdists. `.ci/release` checks the remaining parts."""

from __future__ import annotations

import io
import os
import tarfile
from configparser import ConfigParser
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hybridloader

ROOT = Path(__file__).parent.parent
WORKFLOWS = ROOT / ".github" / "workflows"


def read(path: Path) -> Any:
    yaml = pytest.importorskip("yaml")  # of the extra [test]; it is missing without a GIL
    return yaml.safe_load(path.read_text())


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = spec_from_loader("build", SourceFileLoader("build", str(ROOT / ".ci" / "build")))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_citation_is_of_this_version_and_has_the_keys_that_cff_requires() -> None:
    citation = read(ROOT / "CITATION.cff")
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert str(citation["version"]) == hybridloader.__version__
    assert citation["license"] == config["metadata"]["license_expression"]
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()


@pytest.mark.parametrize("path", sorted(WORKFLOWS.iterdir()), ids=lambda path: path.stem)
def test_a_workflow_has_jobs_and_runs_scripts_that_exist(path: Path) -> None:
    workflow = read(path)
    assert {"name", True, "permissions", "jobs"} <= workflow.keys()  # YAML 1.1 reads "on" as True
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            command = step.get("run", "").split(" ")[0]
            assert not command.startswith(".ci/") or os.access(ROOT / command, os.X_OK), command


def test_only_the_job_that_publishes_may_ask_for_a_token_and_it_runs_no_code() -> None:
    workflow = read(WORKFLOWS / "release.yml")
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    assert workflow["permissions"] == {}
    build, publish = (workflow["jobs"][name] for name in ("build", "publish"))
    assert build["permissions"] == {"contents": "read"}
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build"
    assert not any("run" in step for step in publish["steps"])
    assert any(step.get("run") == ".ci/release dist" for step in build["steps"])


def sdist(path: Path, names: list[str], owner: str, mtime: int, mask: int) -> Path:
    """Make an sdist as setuptools does, on some machine at some time."""
    with tarfile.open(path, "w:gz") as archive:
        folder = tarfile.TarInfo("p-1")
        folder.type, folder.mtime = tarfile.DIRTYPE, mtime
        archive.addfile(folder)
        for name in names:
            entry = tarfile.TarInfo(f"p-1/{name}")
            entry.size, entry.uname, entry.mtime = len(name), owner, mtime
            entry.mode = (0o777 if name == "script" else 0o666) & ~mask
            archive.addfile(entry, io.BytesIO(name.encode()))
    return path


def test_an_sdist_of_any_builder_and_day_is_packed_into_the_same_bytes(
    build: ModuleType, tmp_path: Path
) -> None:
    one = sdist(tmp_path / "one.tar.gz", ["script", "a.py", "b.py"], "ann", 10**9, 0o022)
    two = sdist(tmp_path / "two.tar.gz", ["b.py", "script", "a.py"], "bob", 2 * 10**9, 0o077)
    packed = build.pack_again(one, date=1_234_567_890)
    assert packed == build.pack_again(two, date=1_234_567_890)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        files = [(entry.name, oct(entry.mode), entry.mtime) for entry in archive]
        date = 1_234_567_890
        assert files == [
            ("p-1/a.py", "0o644", date),
            ("p-1/b.py", "0o644", date),
            ("p-1/script", "0o755", date),
        ]
        assert archive.extractfile("p-1/b.py").read() == b"b.py"  # type: ignore[union-attr]
