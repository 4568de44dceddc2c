"""Search for the part of an object that can't be pickled, named by the path of attributes to it."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from hybridloader._support.inheritance import Shared

_DEEPEST = 25
"""Maximum number of steps in the path that an error shows. A search in endlessly nested objects would
take minutes, and a path of more than two lines helps no reader."""


def culprit(thing: Any, path: str, attempt: Callable[[Any], None]) -> str:
    """Find the deepest part of `thing` for which `attempt` raises, as a path of attributes."""
    deepest, seen, shared = (path, thing), {id(thing): thing}, Shared()
    way = [deepest]
    for _ in range(_DEEPEST):
        if deepest[1] in shared:  # made by a library: the user does not know its parts
            break
        for step, part in _parts(deepest[1]):
            if id(part) in seen:
                continue
            seen[id(part)] = part  # kept: the search makes some parts, whose ids could be reused
            try:
                attempt(part)
            except Exception:
                deepest = (deepest[0] + step, part)
                way.append(deepest)
                break
        else:
            break
    else:  # nested endlessly: report the first object that contains others of its type
        kinds = [type(part) for _, part in way]
        repeated = (
            kind not in _CONTAINERS and kind in kinds[i + 1 :] for i, kind in enumerate(kinds)
        )
        deepest = next((each for each, again in zip(way, repeated, strict=True) if again), deepest)
    return f"{deepest[0]} (a {type(deepest[1]).__qualname__})"


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield each object that is pickled with `thing`, with the path from `thing` to it."""
    if isinstance(thing, dict):
        yield from ((f"[{key!r}]", value) for key, value in thing.items())
        yield from ((f".<key>[{i}]", key) for i, key in enumerate(thing))
    elif isinstance(thing, (list, tuple, deque)):
        yield from ((f"[{i}]", value) for i, value in enumerate(thing))
    elif isinstance(thing, (set, frozenset)):
        yield from ((f".<element>[{i}]", value) for i, value in enumerate(thing))
    if isinstance(thing, types.FunctionType):
        yield from _parts_of_function(thing)
    elif isinstance(thing, types.MethodType):
        yield ".__self__", thing.__self__
    elif isinstance(thing, functools.partial):
        yield from ((".func", thing.func), (".args", thing.args), (".keywords", thing.keywords))
    elif isinstance(thing, type):  # a class that can't be imported is pickled with its contents
        yield from ((f".{name}", value) for name, value in vars(thing).items() if not _own(value))
        yield from ((f".<base>.{base.__name__}", base) for base in thing.__bases__)
    elif type(thing) not in _CONTAINERS:
        yield from _parts_of_state(thing)


_CONTAINERS = (dict, list, tuple, deque, set, frozenset)


def _own(value: Any) -> bool:
    """Return True for members that Python makes for each class: slots, ``__dict__``, ``__weakref__``."""
    return isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # an empty cell can be pickled, but has no contents
            yield f".<closure>.{name}", cell.cell_contents
    for name in code.co_names:
        if name in function.__globals__:
            yield f".<global>.{name}", function.__globals__[name]
    yield from ((f".<default>[{i}]", value) for i, value in enumerate(function.__defaults__ or ()))
    named = {**(function.__kwdefaults__ or {}), **vars(function)}
    yield from ((f".{name}", value) for name, value in named.items())


def _parts_of_state(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts that an object pickles; ``__getstate__`` may omit attributes."""
    try:
        reduced = thing.__reduce_ex__(5)
    except Exception:  # the object itself is the culprit
        return
    if not isinstance(reduced, tuple):
        return
    arguments, state = reduced[1], reduced[2] if len(reduced) > 2 else None
    # The state of an object with slots is a pair: its `__dict__` and its slots.
    for named in state if isinstance(state, tuple) and len(state) == 2 else (state,):
        if isinstance(named, dict):
            yield from ((f".{name}", value) for name, value in named.items())
        elif named is not None:
            yield ".<state>", named
    yield ".<class>", type(thing)
    yield from ((f".<argument>[{i}]", value) for i, value in enumerate(arguments))
