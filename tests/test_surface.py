"""The public surface is the one that `surface.txt` lists, and each name has one home."""

from __future__ import annotations

import importlib
from collections import defaultdict

import surface


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
