"""The public surface as text: every public name with its signature.

    python tests/surface.py        # write tests/surface.txt anew, after a change of the surface

`test_surface.py` compares the file, so a change of the surface is a line of a diff.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SURFACE = Path(__file__).with_name("surface.txt")
MODULES = (
    "hybridloader",
    "hybridloader.engine",
    "hybridloader.errors",
    "hybridloader.observe",
    "hybridloader.pipeline",
    "hybridloader.records",
    "hybridloader.sampling",
    "hybridloader.sources",
    "hybridloader.testing",
    "hybridloader.tuning",
)


def public_names(module: Any) -> list[str]:
    """Return the public names of a module: its `__all__`, or the classes that it defines."""
    own = (name for name, value in vars(module).items() if inspect.isclass(value))
    return sorted(getattr(module, "__all__", [*own]))


def signature(value: Any) -> str:
    """Return the parameters of a function or class, without annotations, which depend on Python."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    bare = [one.replace(annotation=one.empty) for one in parameters if one.name != "self"]
    text = str(inspect.Signature(bare)).replace("<factory>", "...")
    return re.sub(r"<(?:function|class) '?([\w.]+)'?(?: at 0x\w+)?>", r"\1", text)


def members(value: type) -> Iterator[str]:
    """Yield a line for each public member that a class of this package defines."""
    for base in value.__mro__:
        if not base.__module__.startswith("hybridloader"):
            continue
        for name, member in vars(base).items():
            if name.startswith("_") or getattr(value, name, None) is None:
                continue
            found = inspect.getattr_static(value, name)
            if isinstance(found, property):
                yield f"    .{name}"
            elif isinstance(found, (classmethod, staticmethod)):
                yield f"    .{name}{signature(getattr(value, name))}"
            elif inspect.isfunction(member):
                yield f"    .{name}{signature(found)}"


def lines() -> Iterator[str]:
    """Yield the lines of the file."""
    for module in MODULES:
        yield f"# {module}"
        imported = importlib.import_module(module)
        for name in public_names(imported):
            value = getattr(imported, name)
            if inspect.isclass(value) and issubclass(value, BaseException):
                bases = ", ".join(base.__name__ for base in value.__bases__)
                yield f"{name}({bases})"
            elif inspect.isclass(value):
                yield f"{name}{'' if issubclass(value, enum.Enum) else signature(value)}"
                yield from sorted({*members(value)})
            elif callable(value):
                yield f"{name}{signature(value)}"
            else:
                yield name
        yield ""


if __name__ == "__main__":
    SURFACE.write_text("\n".join(lines()))
