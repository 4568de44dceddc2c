"""Pages of the reference, made of the package: every public name, the command line, all limits.

`check` fails for a public name that no page has, so a new name can't be forgotten.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import textwrap
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType as Frozen

import torch.utils.data
from docstrings import TORCH, linked

from hybridloader import cli

ROOT = Path(__file__).resolve().parent.parent.parent
TOP = "hybridloader"

PAGES = Frozen(
    {
        "loaders": ("Loaders", "", "DataLoader StatefulDataLoader PipelineLoader"),
        "pipeline": ("Pipelines", "", "Pipeline"),
        "steps": (
            "Runs and steps",
            "Runs of a pipeline, placements of its steps, and the base class of steps of your own.",
            "pipeline.Run pipeline.Epochs pipeline.Placement pipeline.Operator pipeline.Pad",
        ),
        "backends": ("Backends", "", "Inline Threads Fork Spawn SharedMemory Ray Memory"),
        "policies": (
            "Policies",
            "Objects that choose what happens to samples that fail, workers that die, seeds and "
            "devices.",
            "Skip Replace Retry RestartPolicy SampleSeeding Transfer",
        ),
        "workers": ("In a worker", "", "get_worker_info rng"),
        "torch": ("Instead of torch's loader", "", "from_torch install uninstall"),
        "sampling": ("Samplers", "", "sampling.*"),
        "sources": ("Sources", "", "sources.*"),
        "records": ("Shared records", "", "records.*"),
        "observe": ("Statistics and traces", "", "observe.*"),
        "tuning": ("Tuning", "", "tune tuning.*"),
        "errors": (
            "Errors",
            "Every error is a `HybridLoaderError` and one of Python's own classes. "
            "[Errors](../faults.md#errors) lists for each the state of the iterator afterwards.",
            "errors.*",
        ),
        "engine": (
            "For authors of backends",
            "Provisional: these names may change in a minor version. "
            "[Write a backend](../backends.md#writing-one) shows their use.",
            "engine.*",
        ),
        "testing": ("Test tools", "Provisional: may change in a minor version.", "testing.*"),
    }
)
"""Page -> title, introduction, names below `hybridloader` (``*``: all of that module)."""


def names(spec: str) -> list[str]:
    """Return the full names of a page."""
    found = []
    for name in spec.split():
        module, _, last = name.rpartition(".")
        if last == "*":
            imported = importlib.import_module(f"{TOP}.{module}")
            own = [n for n, v in vars(imported).items() if isinstance(v, type)]
            every = getattr(imported, "__all__", own)
            home = [n for n in every if not (module == "engine" and n in ERRORS)]
            found += [f"{TOP}.{module}.{n}" for n in sorted(home)]
        else:
            found.append(f"{TOP}.{name}")
    return found


ERRORS = {
    n for n, v in vars(importlib.import_module(f"{TOP}.errors")).items() if isinstance(v, type)
}


def missing() -> set[str]:
    """Return the public names that no page has."""
    top = importlib.import_module(TOP)
    listed = {name.rpartition(".")[2] for _, _, spec in PAGES.values() for name in names(spec)}
    return {*top.__all__} - listed - {"__version__"}


def pages() -> dict[str, str]:
    """Return the text of each page of the reference."""
    if gone := missing():
        raise SystemExit(f"no page of the reference has {', '.join(sorted(gone))}")
    if odd := TORCH.keys() ^ inspect.signature(torch.utils.data.DataLoader).parameters.keys():
        raise SystemExit(f"parameters of torch's loader, or texts, that are alone: {sorted(odd)}")
    made = {}
    for page, (title, intro, spec) in PAGES.items():
        blocks = [f"# {title}", intro, *map(_entry, names(spec))]
        made[page] = "\n\n".join(block for block in blocks if block) + "\n"
    made["command-line"] = command_line()
    made["limits"] = limits()
    rows = "\n".join(
        f"| [{title}]({page}.md) | {', '.join(map(_short, names(spec)))} |"
        for page, (title, _, spec) in PAGES.items()
    )
    made["index"] = (
        "# Reference\n\nNames without a module are in `hybridloader`; `import hybridloader` is enough "
        "for the others, too.\nThe [command line](command-line.md), [limits](limits.md) and "
        "[environment variables](../environment.md) have separate pages.\n\n"
        f"| page | names |\n| --- | --- |\n{rows}\n"
    )
    return made


def _short(name: str) -> str:
    return f"`{name.removeprefix(f'{TOP}.')}`"


def _entry(name: str) -> str:
    """Return the directive that shows a name; a function of another library is named alone."""
    module, _, last = name.rpartition(".")
    value = getattr(importlib.import_module(module), last)
    home = getattr(value, "__module__", "") or ""
    if home.startswith(TOP) or not callable(value):
        return f"::: {name}"
    return f"## `{name}`\n\n`{home.lstrip('_')}.{last}`, as it is."


def command_line() -> str:
    """Return the help of the command and of its subcommands."""
    parser = cli._parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    text = ["# Command line", "`hybridloader` and `python -m hybridloader` are the same command."]
    for name, command in commands.choices.items():
        command.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=96)
        text += [f"## hybridloader {name}", f"```text\n{command.format_help()}```"]
    return "\n\n".join(text) + "\n"


def limits() -> str:
    """Return a table of the documented constants of the package, by module."""
    rows = []
    for path in sorted(
        [*(ROOT / "hybridloader").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]
    ):
        tree = ast.parse(path.read_text(encoding="utf-8")).body
        for node, after in pairwise(tree):
            if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
                continue
            name = node.targets[0].id
            number = _number(node.value)
            if number is None or not name.isupper() or name.startswith("_"):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                meaning = " ".join(textwrap.dedent(str(after.value.value)).split())
                meaning = linked(meaning)
                rows.append(f"| {path.relative_to(ROOT)} | `{name}` | {number} | {meaning} |")
    return (
        "# Limits and constants\n\nNumbers that decide how the library behaves. They are private: your "
        "program can't set them.\n\n| module | constant | value | meaning |\n| --- | --- | --- | --- |\n"
        + "\n".join(row.replace("``", "`") for row in rows)
        + "\n"
    )


def _number(node: ast.expr) -> str | None:
    parts = (part for part in ast.walk(node) if isinstance(part, ast.expr))
    if not all(isinstance(part, (ast.BinOp, ast.UnaryOp)) or _plain(part) for part in parts):
        return None
    value = eval(ast.unparse(node), {})  # numbers and operators only
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _plain(part: ast.expr) -> bool:
    return isinstance(part, ast.Constant) and isinstance(part.value, (int, float))
