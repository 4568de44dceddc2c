"""Names of a package that are loaded when they are first used, so that importing it imports little."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(
    package: str, homes: Mapping[str, str], modules: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make the ``__getattr__``, the ``__dir__`` and the ``__all__`` of a package.

    `homes` has the names of each module, in one text. A module is named from the package on; one more
    dot in front is the package around it. `modules` are public modules; ``import *`` leaves them out.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name in modules.split():
            return import_module(f".{name}", package)  # which also sets the attribute
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f".{home_of[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    names = sorted([*home_of, *({"__version__"} & vars(sys.modules[package]).keys())])
    return load, lambda: sorted([*names, *modules.split()]), names
