"""The package itself: what it imports, what depends on what, what a wheel holds."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "hybridloader"
BACKENDS = ROOT / "backends"

PACKAGES = ("buffers", "devices", "faults", "records", "running", "seeds", "states")
"""Packages of the core whose modules have a layer each; of the others the whole has one."""

LAYERS = {
    # module -> the modules of the package that it may import when it is imported
    "_version": set[str](),
    "arguments": set(),
    "buffers.arena": {"buffers.seen", "buffers.segments", "buffers.slots"},
    "buffers.collate": {"buffers.packing", "buffers.slots", "buffers.tensors", "worker_info"},
    "buffers.gather": {"buffers.collate", "buffers.slots"},
    "buffers.memory": {"caller"},
    "buffers.packing": {"buffers.tensors", "errors"},
    "buffers.page_locks": {"caller"},
    "buffers.seen": {"buffers.segments"},
    "buffers.segments": set(),
    "buffers.slots": {"buffers.memory", "buffers.segments"},
    "buffers.sparse": set(),
    "buffers.tensors": {"buffers.sparse"},
    "caller": set(),
    "contract": {"buffers.memory", "messages"},
    "conversion": {"dataloader", "options", "registry"},
    "crews": {"contract"},
    "culprit": {"inheritance"},
    "dataloader": {
        "contract",
        "loader_iterator",
        "loader_plan",
        "loader_record",
        "options",
        "registry",
        "states.resuming",
        "states.samplers",
    },
    "datapipes": set(),
    "devices.accelerator": {"devices.in_use", "devices.torch_accelerator"},
    "devices.batch_parts": set(),
    "devices.in_use": set(),
    "devices.pin_thread": {
        "devices.pinning",
        "errors",
        "faults.tried",
        "refresh",
        "relay",
        "stage",
    },
    "devices.pinning": {
        "buffers.page_locks",
        "caller",
        "devices.accelerator",
        "devices.batch_parts",
        "native",
    },
    "devices.torch_accelerator": {"buffers.sparse"},
    "diagnosis": {"contract", "scheduler"},
    "engine": {"contract", "errors", "fetcher", "messages", "serving", "worker"},
    "errors": set(),
    "fallback": {"caller", "contract"},
    "fanout": {"buffers.collate", "errors", "fetcher", "native", "worker_info"},
    "faults.guard": {"errors", "faults.on_error", "fetch", "fetcher"},
    "faults.guarded": {
        "buffers.gather",
        "errors",
        "faults.guard",
        "faults.loop",
        "faults.on_error",
        "faults.tally",
        "faults.tried",
        "fetch",
        "fetcher",
    },
    "faults.guarded_shard": {
        "errors",
        "faults.guard",
        "faults.on_error",
        "faults.places",
        "faults.tally",
        "faults.tried",
        "fetch",
        "fetcher",
        "seeds.draws",
        "shard",
    },
    "faults.in_place": {"errors", "faults.losses", "faults.tried"},
    "faults.loop": {"faults.guard", "faults.tally", "faults.tried", "fetch", "fetcher"},
    "faults.losses": {"errors", "faults.on_error", "faults.places", "faults.tried"},
    "faults.memory_state": {"buffers.memory"},
    "faults.on_error": set(),
    "faults.places": {"errors"},
    "faults.refill": {"errors", "faults.losses", "faults.tried"},
    "faults.restart": set(),
    "faults.supervision": {
        "contract",
        "diagnosis",
        "errors",
        "faults.restart",
        "feed",
        "fetch",
        "messages",
        "roster",
        "scheduler",
    },
    "faults.tally": {"errors", "faults.guard", "faults.tried", "fetch", "fetcher"},
    "faults.tried": {"errors"},
    "feed": {"contract", "errors", "messages"},
    "fetch": {
        "buffers.gather",
        "datapipes",
        "errors",
        "faults.on_error",
        "fetcher",
        "seeds.sample_seeds",
        "states.carried",
    },
    "fetcher": set(),
    "foreign": set(),
    "inheritance": set(),
    "installation": {"caller", "errors", "late", "options", "registry"},
    "late": set(),
    "lazily": set(),
    "lifecycle": {
        "contract",
        "crews",
        "diagnosis",
        "errors",
        "faults.restart",
        "faults.supervision",
        "feed",
        "messages",
        "refresh",
        "roster",
        "scheduler",
    },
    "loader_iterator": {
        "buffers.collate",
        "caller",
        "contract",
        "crews",
        "devices.pin_thread",
        "devices.pinning",
        "diagnosis",
        "errors",
        "faults.losses",
        "faults.on_error",
        "faults.refill",
        "faults.restart",
        "faults.tried",
        "fetch",
        "fetcher",
        "loader_plan",
        "messages",
        "records.large",
        "refresh",
        "scheduler",
        "seeds.pass_seeds",
        "stage",
        "states.copies",
        "states.progress",
        "states.resuming",
    },
    "loader_plan": {
        "buffers.memory",
        "caller",
        "contract",
        "fallback",
        "loader_record",
        "options",
        "registry",
        "states.samplers",
    },
    "loader_record": set(),
    "messages": set(),
    "native": {"late"},
    "options": {"devices.pinning", "faults.on_error", "faults.restart", "seeds.sample_seeds"},
    "pipeline": {"buffers.collate", "fetch", "operators", "steps"},
    "records.columns": {"records.shared_buffer"},
    "records.large": {"caller"},
    "records.shared_buffer": {"buffers.segments", "errors"},
    "records.shared_dict": {"records.columns", "records.shared_list"},
    "records.shared_list": {"records.columns", "records.shared_buffer"},
    "refresh": set(),
    "registry": {"buffers.memory", "contract", "errors"},
    "relay": {"errors"},
    "roster": {"contract", "diagnosis", "messages", "scheduler"},
    "running.drawing": {"operators", "running.plan"},
    "running.feeder": {"relay", "running.plan"},
    "running.flow": {
        "contract",
        "diagnosis",
        "errors",
        "faults.in_place",
        "faults.losses",
        "faults.places",
        "faults.tried",
        "feed",
        "fetcher",
        "refresh",
        "relay",
        "running.ledger",
        "scheduler",
        "stage",
    },
    "running.inline_items": {
        "errors",
        "faults.guard",
        "faults.in_place",
        "faults.loop",
        "faults.losses",
        "faults.on_error",
        "faults.tally",
        "fetcher",
        "running.work",
        "seeds.draws",
    },
    "running.ledger": {"contract", "feed", "messages"},
    "running.line": {
        "errors",
        "feed",
        "native",
        "operators",
        "relay",
        "running.flow",
        "running.inline_items",
        "running.passes",
        "running.plan",
        "states.dropping",
        "states.trail",
    },
    "running.machine": {
        "caller",
        "devices.pinning",
        "errors",
        "fetcher",
        "operators",
        "relay",
        "running.feeder",
        "running.flow",
        "running.line",
        "running.passes",
        "running.plan",
        "running.soundness",
        "running.stations",
        "states.resume",
        "states.trail",
    },
    "running.passes": {"errors", "fetcher", "operators", "states.dropping", "states.trail"},
    "running.plan": {"fallback", "operators", "scheduler"},
    "running.readers": {
        "errors",
        "faults.guard",
        "faults.guarded_shard",
        "faults.on_error",
        "faults.places",
        "faults.tally",
        "fetch",
        "fetcher",
        "seeds.draws",
    },
    "running.run": {
        "crews",
        "errors",
        "faults.losses",
        "relay",
        "running.machine",
        "running.statistics",
        "states.dropping",
        "states.resume",
        "states.trail",
    },
    "running.soundness": {"errors", "operators", "running.plan"},
    "running.stations": {
        "errors",
        "faults.losses",
        "fetcher",
        "messages",
        "operators",
        "refresh",
        "running.flow",
        "running.ledger",
        "running.plan",
        "running.readers",
        "running.work",
        "scheduler",
        "seeds.numbering",
        "seeds.sample_seeds",
        "stage",
        "states.trail",
    },
    "running.statistics": {"diagnosis", "running.plan"},
    "running.work": {
        "fanout",
        "faults.guard",
        "faults.loop",
        "faults.on_error",
        "faults.tally",
        "fetch",
        "fetcher",
        "seeds.draws",
    },
    "scheduler": {"errors", "messages"},
    "script": set(),
    "seeds.borrowing": {"devices.in_use", "seeds.draws"},
    "seeds.by_thread": {"late", "seeds.draws"},
    "seeds.draws": {"faults.on_error", "late", "seeds.sample_seeds"},
    "seeds.numbering": {"contract", "feed", "messages"},
    "seeds.pass_seeds": {
        "seeds.borrowing",
        "seeds.draws",
        "seeds.numbering",
        "seeds.sample_seeds",
    },
    "seeds.sample_generators": {"seeds.draws", "seeds.sample_seeds"},
    "seeds.sample_seeds": set(),
    "seeds.seeded_items": {"seeds.draws"},
    "seeds.seeding": {"late", "seeds.borrowing", "seeds.draws", "seeds.sample_seeds"},
    "seeds.thread_draws": {"seeds.by_thread", "seeds.draws", "seeds.sample_seeds"},
    "serving": {
        "buffers.packing",
        "contract",
        "errors",
        "fetcher",
        "inheritance",
        "messages",
        "native",
        "seeds.seeding",
        "shipping",
        "worker",
        "worker_info",
    },
    "shard": {"faults.tried", "fetch", "fetcher", "seeds.draws", "states.carried"},
    "shipping": {
        "buffers.arena",
        "buffers.packing",
        "buffers.segments",
        "buffers.sparse",
        "buffers.tensors",
        "culprit",
        "errors",
        "inheritance",
    },
    "stateful_dataloader": {
        "dataloader",
        "loader_record",
        "sampling",
        "states.resuming",
        "states.torchdata_form",
    },
    "shown": set(),
    "stage": {
        "contract",
        "errors",
        "faults.restart",
        "feed",
        "lifecycle",
        "messages",
        "scheduler",
    },
    "states.cadence": set(),
    "states.carried": {"states.cadence", "states.copies"},
    "states.copies": {"errors", "inheritance", "states.cadence"},
    "states.dropping": {"errors", "feed", "fetcher", "relay"},
    "states.progress": {
        "errors",
        "faults.refill",
        "faults.tried",
        "fetch",
        "states.carried",
        "states.copies",
    },
    "states.replay": {"errors", "states.copies", "states.samplers"},
    "states.resume": {"errors", "operators", "running.plan", "states.schema", "states.trail"},
    "states.resuming": {
        "caller",
        "datapipes",
        "errors",
        "fetch",
        "scheduler",
        "states.carried",
        "states.copies",
        "states.progress",
        "states.replay",
        "states.samplers",
        "states.state",
    },
    "states.samplers": {"errors", "states.cadence", "states.copies"},
    "states.schema": {"errors"},
    "states.state": {
        "errors",
        "states.carried",
        "states.copies",
        "states.progress",
        "states.replay",
        "states.samplers",
        "states.schema",
    },
    "states.torchdata_form": {
        "errors",
        "states.copies",
        "states.resuming",
        "states.state",
    },
    "states.trail": {"errors", "operators", "running.plan", "states.copies"},
    "steps": {"buffers.memory", "operators"},
    "worker": {
        "contract",
        "datapipes",
        "errors",
        "fetcher",
        "messages",
        "refresh",
        "seeds.draws",
        "seeds.seeding",
        "states.carried",
        "worker_info",
    },
    "worker_info": {"late"},
}
EVERYWHERE = {"arguments", "caller", "foreign", "lazily", "shown"}
"""What every module of the core may import: they import nothing else."""

BACKENDS_MAY_USE = {
    "backends",
    "buffers.arena",
    "buffers.collate",
    "buffers.memory",
    "buffers.packing",
    "buffers.seen",
    "buffers.segments",
    "buffers.slots",
    "caller",
    "contract",
    "crews",
    "datapipes",
    "devices.in_use",
    "errors",
    "faults.memory_state",
    "fetcher",
    "inheritance",
    "late",
    "messages",
    "native",
    "seeds.seeding",
    "serving",
    "shipping",
    "states.carried",
    "worker",
    "worker_info",
}


def imported_at_import(path: Path) -> set[str]:
    """What a module imports from the package when it is imported, TYPE_CHECKING left out."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.ImportFrom) and node.module:
            top, *parts = node.module.split(".")
            if top != "hybridloader":
                pass
            elif not parts:
                found.update(alias.name for alias in node.names)
            elif parts[0] not in PACKAGES:
                found.add(parts[0])
            elif len(parts) == 1:
                found.update(f"{parts[0]}.{alias.name}" for alias in node.names)
            else:
                found.add(".".join(parts[:2]))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def layered() -> dict[str, Path]:
    """Every module of the core, by its name within the package."""
    found = {path.stem: path for path in CORE.glob("*.py")}
    for package in PACKAGES:
        modules = (CORE / package).glob("*.py")
        found |= {f"{package}.{path.stem}": path for path in modules if path.stem != "__init__"}
    return {name: found[name] for name in sorted(found)}


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    return done.stdout.strip()


@pytest.mark.parametrize("module", sorted(LAYERS))
def test_a_module_imports_only_what_its_layer_allows(module: str) -> None:
    assert imported_at_import(layered()[module]) <= LAYERS[module] | EVERYWHERE


def test_every_module_has_a_layer() -> None:
    assert {*layered()} - {"__init__", "__main__", "cli"} == {*LAYERS}


def test_the_packages_of_the_core_import_nothing_themselves() -> None:
    for package in PACKAGES:  # else a worker that needs one module would load them all
        assert not imported_at_import(CORE / package / "__init__.py")


@pytest.mark.parametrize("path", sorted(BACKENDS.glob("*.py")), ids=lambda path: path.stem)
def test_backends_use_the_contract_and_what_workers_need(path: Path) -> None:
    assert imported_at_import(path) <= BACKENDS_MAY_USE


@pytest.mark.parametrize(
    "path",
    [*sorted(CORE.rglob("*.py")), *sorted(BACKENDS.glob("*.py"))],
    ids=lambda path: f"{path.parent.name}.{path.stem}",
)
def test_nothing_posix_only_is_imported_or_touched_at_import(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imported = {
        name.split(".")[0]
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
    }
    assert not imported & {"fcntl", "resource", "termios", "pwd", "grp", "_posixshmem", "_winapi"}
    for node in tree.body:  # os.fork and its like only inside functions
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
            assert not names & {"fork", "memfd_create", "pidfd_open", "posix_fallocate"}


def test_importing_the_package_imports_neither_torch_nor_loky() -> None:
    code = (
        "import sys, hybridloader, hybridloader.engine;"
        "hybridloader.backend_names(); hybridloader.get_worker_info();"
        "print(sorted({'torch', 'loky', 'numpy', 'cloudpickle'} & set(sys.modules)))"
    )
    assert run(code) == "[]"


def test_a_worker_process_starts_without_torch() -> None:
    code = (
        "import sys, hybridloader.backends.process.child;"
        "print(sorted({'torch', 'loky', 'numpy', 'cloudpickle'} & set(sys.modules)))"
    )
    assert run(code) == "[]"


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
    for module in [*BACKENDS.glob("*.py")]:
        assert f"hybridloader/backends/{module.name}" in names
    for module in [*CORE.rglob("*.py")]:
        assert f"hybridloader/{module.relative_to(CORE).as_posix()}" in names
    assert "hybridloader/py.typed" in names
    required = {
        line.split(":")[1].strip().split(">")[0]
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist:") and "extra ==" not in line
    }
    assert required == {"torch", "numpy", "loky", "cloudpickle"}


def test_readme_and_ci_agree_on_how_to_run_the_tests() -> None:
    readme = (ROOT / "README.md").read_text()
    assert 'pip install -c constraints.txt -e ".[demo]" && hybridloader demo' in readme
    assert readme.count('pip install -c constraints.txt -e ".[test]" && pytest') == 1


def test_constraints_pin_everything_that_is_required() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    pinned = {
        line.split("==")[0]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    extras = config["options.extras_require"]
    required = config["options"]["install_requires"]
    for wanted in (required, extras["demo"], extras["test"], extras["frameworks"]):
        for line in wanted.split():
            assert line.split(">")[0] in pinned, line
