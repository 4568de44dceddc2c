"""The part of a thing that can't be pickled, named by the path of attributes that leads to it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from hybridloader.foreign import attribute, has
from hybridloader.inheritance import Shared

_DEEPEST = 25
"""Steps of the path that an error shows. What is nested without an end would be looked into for minutes,
and more than a line or two helps nobody."""


def culprit(thing: Any, path: str, attempt: Callable[[Any], None]) -> str:
    """The deepest part of `thing` for which `attempt` raises, as a path of attributes."""
    deepest, seen, shared = (path, thing), {id(thing)}, Shared()
    for _ in range(_DEEPEST):
        if deepest[1] in shared:  # made by a library: what it is made of is nothing to the user
            break
        for step, part in _parts(deepest[1]):
            if id(part) in seen:
                continue
            seen.add(id(part))
            try:
                attempt(part)
            except Exception:
                deepest = (deepest[0] + step, part)
                break
        else:
            break
    return f"{deepest[0]} (a {type(deepest[1]).__qualname__})"


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, dict):
        yield from ((f"[{key!r}]", value) for key, value in thing.items())
    elif isinstance(thing, (list, tuple)):
        yield from ((f"[{i}]", value) for i, value in enumerate(thing))
    elif isinstance(thing, types.FunctionType):
        code = thing.__code__
        for name, cell in zip(code.co_freevars, thing.__closure__ or (), strict=True):
            if cell != types.CellType():  # an empty cell can be pickled, but not looked into
                yield f".<closure>.{name}", cell.cell_contents
        for name in code.co_names:
            if name in thing.__globals__:
                yield f".<global>.{name}", thing.__globals__[name]
    elif isinstance(thing, types.MethodType):
        yield ".__self__", thing.__self__
    elif isinstance(thing, functools.partial):
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    else:
        slots = [slot for kind in type(thing).__mro__ for slot in getattr(kind, "__slots__", ())]
        names = [*attribute(thing, "__dict__", ()), *slots]
        yield from ((f".{name}", attribute(thing, name)) for name in names if has(thing, name))
