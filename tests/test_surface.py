"""The public surface is the one that `surface.txt` lists, and each name has one home."""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import surface

WHITE_BOX = 52
"""Most files of tests that import parts of the inside. This number only falls."""


def test_the_surface_is_the_listed_one() -> None:
    listed = surface.SURFACE.read_text()
    assert "\n".join(surface.lines()) == listed, "run python tests/surface.py, and read the diff"


def test_a_name_has_one_home() -> None:
    homes = defaultdict(list)
    for module in surface.MODULES:
        for name in surface.public_names(importlib.import_module(module)):
            homes[name].append(module.removeprefix("hybridloader.") or module)
    several = {name: found for name, found in homes.items() if len(found) > 1}
    # Errors that programs catch are at the top level, too; authors of a backend import one module.
    allowed = {"hybridloader", "engine", "errors"}
    assert {name for name, found in several.items() if not {*found} <= allowed} == set()
    errors = {*surface.public_names(importlib.import_module("hybridloader.errors"))}
    assert several.keys() <= errors


def imports(file: Path) -> Iterator[tuple[str, str]]:
    """Modules that a file imports, each with the name that it takes from it, or with none."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def test_few_tests_know_the_inside() -> None:
    """A test of the inside holds it as it is: a public effect is held by the public names.

    A name of the inside that a module of `support` passes on counts for the file that imports it.
    """
    public = {
        name: {*surface.public_names(importlib.import_module(name))} for name in surface.MODULES
    }
    public["hybridloader.integrations.accelerate"] = {"keep_loaders"}

    def inside(module: str, name: str) -> bool:
        if module.partition(".")[0] != "hybridloader":
            return False
        if module not in public:
            return True
        return name not in {"", *public[module]} and f"{module}.{name}" not in public

    files = {file: [*imports(file)] for file in sorted(Path(__file__).parent.rglob("*.py"))}
    passed_on = {
        (f"support.{file.stem}", name)
        for file, found in files.items()
        for module, name in found
        if file.parent.name == "support" and inside(module, name)
    }
    found = [
        file
        for file, taken in files.items()
        if any(inside(*one) or one in passed_on for one in taken)
    ]
    assert len(found) <= WHITE_BOX, found
    assert not [file for file in found if "contract" in file.parts]
