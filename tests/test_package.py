"""The package itself: what it imports, what depends on what, what a wheel holds."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
from support.command import main
from support.platforms import FORK
from support.programs import output

import hybridloader

ROOT = Path(__file__).parent.parent
CORE = ROOT / "hybridloader"
BACKENDS = ROOT / "backends"
PACKAGES = ("engine", "observe", "pipeline", "records", "sampling", "sources", "testing", "tuning")


def test_no_module_hides_a_public_name() -> None:
    """The import of a module ``hybridloader.rng``, say, would hide the function of that name."""
    for package in [hybridloader, *map(hybridloader.__getattr__, PACKAGES)]:
        folder = Path(str(package.__file__)).parent
        assert not {path.stem for path in folder.iterdir()} & {*package.__all__}, package


def test_packages_import_nothing_themselves() -> None:
    """A worker that needs one module must not load them all. Public packages load names lazily."""
    for path in [*CORE.rglob("__init__.py"), *BACKENDS.rglob("__init__.py")]:
        imported = {
            node.module
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.ImportFrom)
        }
        lazy = {"__future__", "typing", "hybridloader._support.lazily", "hybridloader._version"}
        assert imported <= lazy, path


def test_only_one_module_asks_which_platform_this_is() -> None:
    asks = re.compile(
        r"sys\.platform|os\.name\b|platform\.system"
        r"|^\s*import (fcntl|resource|termios|pwd|_posixshmem|_winapi)"
        r"|(has|get)attr\((os|signal|mmap|select|multiprocessing), ",
        re.MULTILINE,
    )
    found = [
        path
        for path in [*CORE.rglob("*.py"), *BACKENDS.rglob("*.py")]
        if asks.search(path.read_text())
    ]
    assert found == [CORE / "_support" / "system.py"]


def test_the_package_and_a_worker_process_start_with_neither_torch_nor_loky() -> None:
    code = (
        "import sys, hybridloader.engine, hybridloader.backends.process.child;"
        "hybridloader.engine.backend_names(); hybridloader.get_worker_info();"
        "print(sorted({'torch', 'loky', 'numpy', 'cloudpickle'} & set(sys.modules)))"
    )
    assert output("-c", code, cwd="/") == "[]\n"


def test_every_public_name_loads_and_is_listed() -> None:
    import hybridloader

    for name in hybridloader.__all__:
        assert getattr(hybridloader, name) is not None
    assert set(hybridloader.__all__) <= set(dir(hybridloader))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hybridloader.no_such_name


def test_a_wheel_holds_the_backends_inside_the_package_and_nothing_beside_it(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", str(tmp_path), str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hybridloader"}
    for module in [*BACKENDS.rglob("*.py")]:
        assert f"hybridloader/backends/{module.relative_to(BACKENDS).as_posix()}" in names
    for module in [*CORE.rglob("*.py")]:
        assert f"hybridloader/{module.relative_to(CORE).as_posix()}" in names
    assert "hybridloader/py.typed" in names
    texts = {name for name in names if name.startswith("hybridloader/docs/")}
    assert texts == {"hybridloader/docs/troubleshooting.md"}  # for `hybridloader explain`
    required = {
        line.split(":")[1].strip().split(">")[0]
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist:") and "extra ==" not in line
    }
    assert required == {"torch", "numpy", "loky", "cloudpickle"}
    assert {"License-Expression: BSD-3-Clause", "License-File: LICENSE"} <= {*metadata.splitlines()}


def test_readme_and_ci_agree_on_how_to_run_the_tests() -> None:
    readme = (ROOT / "README.md").read_text()
    assert 'pip install -c constraints.txt -e ".[demo]" && hybridloader demo' in readme
    assert readme.count('pip install -c constraints.txt -e ".[test]" && pytest') == 1


def test_constraints_pin_everything_that_is_required() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    pinned = {
        line.split("==")[0].replace("-", "_")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    extras = config["options.extras_require"]
    required = config["options"]["install_requires"]
    for wanted in (required, *extras.values()):
        for line in wanted.split():
            assert re.split(r"[>\[]", line)[0].replace("-", "_") in pinned, line


def test_info_prints_what_a_bug_report_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = importlib.metadata.version
    absent = {"loky": "no-such-package"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version(absent.get(name, name)))
    assert main(["info"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["Python"] == sys.version.splitlines()[0].rstrip()
    assert lines["torch"] == importlib.metadata.version("torch")
    assert lines["loky"] == "not installed"
    assert lines["inline"] == lines["threads"] == "works"
    assert (lines["fork"] == "works") is FORK
    assert lines["memory"].endswith(" GiB")
