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

LAYERS = {
    # module -> the modules of the package that it may import when it is imported
    "_version": set[str](),
    "errors": set(),
    "relay": {"errors"},
    "crews": {"contract"},
    "feed": {"errors", "messages"},
    "ledger": {"contract", "feed", "messages"},
    "refresh": set(),
    "segments": set(),
    "memory": set(),
    "late": set(),
    "native": {"late"},
    "large": set(),
    "key_table": set(),
    "shared_buffer": {"errors", "segments"},
    "columns": {"shared_buffer"},
    "shared_list": {"columns", "shared_buffer"},
    "shared_dict": {"columns", "key_table", "shared_buffer", "shared_list"},
    "containers": {"large", "shared_dict", "shared_list"},
    "slots": {"segments"},
    "arena": {"seen", "segments", "slots"},
    "collate": {"packing", "slots"},
    "worker_info": {"late"},
    "seeding": {"draws", "late"},
    "sample_seeds": set(),
    "draws": {"late", "on_error", "sample_seeds"},
    "sample_generators": {"draws", "sample_seeds"},
    "by_thread": {"draws"},
    "stand_ins": {"by_thread", "draws", "late", "sample_seeds"},
    "thread_draws": {"draws", "sample_seeds", "stand_ins", "worker_info"},
    "numbering": {"contract", "feed", "messages"},
    "seeded_items": {"careful", "draws", "fanout", "fetch", "outcomes"},
    "pass_seeds": {"contract", "draws", "epochs", "numbering", "sample_seeds", "seeding"},
    "messages": set(),
    "gather": {"collate", "slots"},
    "fetch": {"carried", "errors", "gather", "on_error", "sample_seeds"},
    "fanout": {"collate", "errors", "fetch", "native", "worker_info"},
    "contract": {"messages"},
    "shipping": {"arena", "errors", "packing", "segments"},
    "packing": {"errors"},
    "scheduler": {"errors", "messages"},
    "worker": {
        "carried",
        "contract",
        "draws",
        "errors",
        "fetch",
        "messages",
        "refresh",
        "seeding",
        "worker_info",
    },
    "registry": {"arguments", "contract", "errors"},
    "diagnosis": {"contract", "scheduler"},
    "stage": {
        "contract",
        "crews",
        "diagnosis",
        "errors",
        "feed",
        "handing_out",
        "messages",
        "overruns",
        "recovery",
        "refresh",
        "restart",
        "roster",
        "scheduler",
        "supply",
    },
    "work": {"careful", "fetch", "guard", "on_error", "outcomes"},
    "flow": {
        "contract",
        "diagnosis",
        "errors",
        "feed",
        "fetch",
        "ledger",
        "losses",
        "outcomes",
        "refresh",
        "relay",
        "scheduler",
        "stage",
    },
    "plan": {"fallback", "operators", "scheduler"},
    "pipeline": {"collate", "fetch", "operators", "steps"},
    "machine": {
        "caller",
        "errors",
        "feeder",
        "fetch",
        "flow",
        "line",
        "operators",
        "passes",
        "pinning",
        "plan",
        "relay",
        "resume",
        "soundness",
        "stations",
        "trail",
    },
    "statistics": {"diagnosis", "plan"},
    "drawing": {"operators", "plan", "statistics"},
    "run": {
        "crews",
        "dropping",
        "errors",
        "losses",
        "machine",
        "relay",
        "resume",
        "statistics",
        "trail",
    },
    "on_error": set(),
    "tried": {"errors"},
    "losses": {"errors", "on_error", "tried"},
    "guard": {"errors", "fetch", "on_error", "tried"},
    "guarded": {"errors", "fetch", "gather", "guard", "on_error", "tried"},
    "guarded_shard": {"draws", "errors", "fetch", "guard", "on_error", "shard", "tried"},
    "refill": {"errors", "losses", "tried"},
    "outcomes": {"errors", "tried"},
    "careful": {"fanout", "fetch", "guard", "outcomes", "tried"},
    "readers": {"fetch", "guard", "guarded_shard", "on_error", "outcomes", "work"},
    "inline_items": {
        "careful",
        "diagnosis",
        "draws",
        "errors",
        "fetch",
        "guard",
        "losses",
        "on_error",
        "outcomes",
        "work",
    },
    "loader_iterator": {
        "caller",
        "carried",
        "collate",
        "contract",
        "crews",
        "diagnosis",
        "errors",
        "fetch",
        "large",
        "losses",
        "messages",
        "on_error",
        "options",
        "pass_seeds",
        "pin_thread",
        "pinning",
        "progress",
        "refill",
        "refresh",
        "restart",
        "resuming",
        "scheduler",
        "stage",
    },
    "restart": set(),
    "dataloader": {
        "arguments",
        "choice",
        "contract",
        "epochs",
        "loader_iterator",
        "options",
        "registry",
        "replay",
        "resuming",
    },
    "arguments": {"memory"},
    "caller": set(),
    "carried": {"errors"},
    "dropping": {"errors", "feed", "fetch", "relay"},
    "epochs": set(),
    "fallback": {"caller", "contract"},
    "memory_state": set(),
    "overruns": {"errors", "messages", "roster", "scheduler"},
    "passes": {"dropping", "errors", "fetch", "operators", "trail"},
    "progress": {"carried", "fetch", "refill", "tried"},
    "recovery": {
        "diagnosis",
        "errors",
        "feed",
        "fetch",
        "messages",
        "restart",
        "roster",
        "scheduler",
    },
    "replay": {"carried", "errors"},
    "resume": {"errors", "operators", "plan", "trail"},
    "resuming": {
        "caller",
        "carried",
        "epochs",
        "errors",
        "fetch",
        "progress",
        "replay",
        "scheduler",
        "state",
    },
    "roster": {"contract", "diagnosis", "messages", "scheduler"},
    "shard": {"carried", "fetch", "tried"},
    "state": {"carried", "errors", "progress", "replay"},
    "trail": {"errors", "operators", "plan"},
    "feeder": {"plan", "relay"},
    "line": {
        "dropping",
        "errors",
        "feed",
        "flow",
        "inline_items",
        "native",
        "operators",
        "passes",
        "plan",
        "relay",
        "trail",
    },
    "stations": {
        "errors",
        "fetch",
        "flow",
        "ledger",
        "losses",
        "messages",
        "numbering",
        "operators",
        "plan",
        "readers",
        "refresh",
        "sample_seeds",
        "scheduler",
        "stage",
        "trail",
        "work",
    },
    "accelerator": set(),
    "batch_parts": set(),
    "choice": {"caller", "contract", "fallback", "memory", "registry"},
    "conversion": {"dataloader", "options", "registry"},
    "installation": {"caller", "choice", "contract", "late", "options", "registry"},
    "options": {"on_error", "pinning", "restart", "sample_seeds"},
    "page_locks": {"caller"},
    "pin_thread": {"carried", "errors", "pinning", "refresh", "relay", "stage", "tried"},
    "pinning": {"accelerator", "batch_parts", "caller", "native", "page_locks"},
    "script": set(),
    "seen": {"segments"},
    "soundness": {"errors", "operators", "plan"},
    "steps": {"memory", "operators"},
    "handing_out": {"errors", "messages", "roster"},
    "supply": {"contract", "errors", "feed", "messages", "roster", "scheduler"},
}
BACKENDS_MAY_USE = {
    "arena", "backends", "caller", "collate", "contract", "errors", "fetch", "late", "memory",
    "memory_state", "messages",
    "native", "packing", "seeding", "seen", "segments", "shipping", "slots", "worker", "worker_info",
}  # fmt: skip


def imported_at_import(path: Path) -> set[str]:
    """What a module imports from the package when it is imported, TYPE_CHECKING left out."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "hybridloader":
                found.update(alias.name for alias in node.names)
            elif node.module.startswith("hybridloader."):
                found.add(node.module.split(".")[1])
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    return done.stdout.strip()


@pytest.mark.parametrize("module", sorted(LAYERS))
def test_a_module_imports_only_what_its_layer_allows(module: str) -> None:
    assert imported_at_import(CORE / f"{module}.py") <= LAYERS[module]


def test_every_module_has_a_layer() -> None:
    modules = {path.stem for path in CORE.glob("*.py")} - {"__init__", "__main__", "cli"}
    assert modules == set(LAYERS)


@pytest.mark.parametrize("path", sorted(BACKENDS.glob("*.py")), ids=lambda path: path.stem)
def test_backends_use_the_contract_and_what_workers_need(path: Path) -> None:
    assert imported_at_import(path) <= BACKENDS_MAY_USE


@pytest.mark.parametrize(
    "path", [*sorted(CORE.glob("*.py")), *sorted(BACKENDS.glob("*.py"))], ids=lambda path: path.stem
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
        "import sys, hybridloader; hybridloader.backend_names(); hybridloader.get_worker_info();"
        "print(sorted({'torch', 'loky', 'numpy', 'cloudpickle'} & set(sys.modules)))"
    )
    assert run(code) == "[]"


def test_a_worker_process_starts_without_torch() -> None:
    code = (
        "import sys, hybridloader.backends.child;"
        "print(sorted({'torch', 'loky', 'numpy', 'cloudpickle'} & set(sys.modules)))"
    )
    assert run(code) == "[]"


def test_every_public_name_loads_and_is_listed() -> None:
    import hybridloader

    for name in hybridloader.__all__:
        assert getattr(hybridloader, name) is not None
    assert set(hybridloader.__all__) <= set(dir(hybridloader))
    assert set(hybridloader._HOMES) == set(hybridloader.__all__) - {"__version__"}
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
    for wanted in (config["options"]["install_requires"], extras["demo"], extras["test"]):
        for line in wanted.split():
            assert line.split(">")[0] in pinned, line
