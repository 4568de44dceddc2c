"""Fingerprints: short digests of the values that a step was given.

They distinguish a step from another of the same name. They follow from values and not from addresses, so
they are the same in every run of a script. The work is bounded: only a sample of a large value is read.
No code of the user's is called: only the attributes of an object are read. So a dataset that loads
samples on demand loads none.

The bodies of functions, and the contents of files, are not read.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import pathlib
import random
import re
import sys
import types
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

from hybridloader._support.attributes import own_attributes
from hybridloader.running.operator import Chain, Operator, steps_in

_MOST_VALUES = 20_000
"""Greatest number of values that are read in all: some 50 ms."""

_ALL = 64
"""Items of a container, or kilobytes of a text, up to which all are read; of more, as many."""

_ELEMENTS = 1024
"""Greatest number of elements of an array that are read."""

_DEEPEST = 12
"""Greatest depth of objects within one another."""

_PLAIN = {
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    fractions.Fraction,
    range,
    slice,
    uuid.UUID,
    type(None),
    type(...),
}
"""Types whose repr has the whole value."""

_PARTS = {
    functools.partial: ("func", "args", "keywords"),
    re.Pattern: ("pattern", "flags"),
    types.MethodType: ("__func__", "__self__"),
}
"""Attributes that have the whole value, by type."""


def fingerprint(value: Any) -> str:
    """Return ten hexadecimal digits that follow from `value`."""
    digest = hashlib.blake2b(digest_size=5)
    for piece in _Look().at(value, 0):
        digest.update(f"{len(piece)}:".encode())
        digest.update(piece)
    return digest.hexdigest()


def fingerprint_of_steps(chain: Chain) -> str:
    """Describe the steps of a pipeline, with a digest of the values that each was given."""
    steps = []
    for operator in chain.operators:
        branches = "".join(f"[{fingerprint_of_steps(branch)}]" for branch in operator.branches())
        steps.append(f"{operator.describe(None)} #{fingerprint(_values(operator))}{branches}")
    return " -> ".join(steps)


def ranks_of_steps(chain: Chain) -> str:
    """Describe which rank of how many this process is now, for each step that selects by rank.

    Empty where it is the only one.
    """
    shares = (step.share or (1, 0) for step in steps_in(chain))
    return "".join(f" rank {rank} of {ranks}" for ranks, rank in shares if ranks > 1)


def _values(operator: Operator) -> dict[str, Any]:
    """Return the values that decide which items come out of `operator`, not where or how fast."""
    own: Any = operator
    if not (is_dataclass(own) and fields(own)):
        return dict(getattr(operator, "__dict__", {}))
    apart = ("placement", *operator.not_fingerprinted)
    names = (field.name for field in fields(own) if field.compare and field.name not in apart)
    found = {name: getattr(operator, name) for name in names}
    if operator.placement is not None:
        found["on_error"] = operator.placement.on_error
        found["seeding"] = operator.placement.seeding
    return found


def drawn(count: int) -> Sequence[int]:
    """Return the places that are read in a container of `count` items: a function of `count`."""
    return range(count) if count <= _ALL else _places(count, _ALL)


def _places(count: int, most: int) -> list[int]:
    """Return places at the ends, and drawn from between."""
    between = random.Random(count).sample(range(8, count - 8), most - 16)
    return [*range(8), *sorted(between), *range(count - 8, count)]


class _Look:
    """Walk through a value and all within it."""

    def __init__(self) -> None:
        # All the mutable state:
        self._met: dict[int, int] = {}  # by identity, which came when
        self._kept: list[Any] = []  # so that no identity is given twice
        self._left = _MOST_VALUES

    def at(self, value: Any, depth: int) -> Iterator[bytes]:
        """Yield the bytes that stand for `value`."""
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            yield b"..."
            return
        kind = type(value)
        yield f"{kind.__module__}.{kind.__qualname__}".encode()
        if kind in _PLAIN:
            yield repr(value).encode()
        elif isinstance(value, enum.Enum):
            yield str(value._name_).encode(errors="surrogatepass")
        elif isinstance(value, int):
            yield int.__format__(value, "x").encode()  # of any length
        elif isinstance(value, (float, complex)):
            base: Any = float if isinstance(value, float) else complex
            yield base.__repr__(value).encode()
        elif isinstance(value, (bytes, bytearray)):
            yield from _text(memoryview(value))
        elif isinstance(value, (str, pathlib.PurePath)):
            text = value if isinstance(value, str) else str(value)
            yield from _text(memoryview(str.encode(text, errors="surrogatepass")))
        elif isinstance(value, (type, types.BuiltinFunctionType)):
            yield f"{value.__module__}.{value.__qualname__}".encode()
        elif id(value) in self._met:
            yield b"again %d" % self._met[id(value)]
        else:
            self._met[id(value)] = len(self._met)
            self._kept.append(value)
            yield from self._inside(value, depth + 1)

    def _inside(self, value: Any, depth: int) -> Iterator[bytes]:
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if isinstance(value, (list, tuple, deque, dict, set, frozenset)):
            yield from self._container(value, depth)
        elif isinstance(value, types.FunctionType):
            yield f"{value.__module__}.{value.__qualname__}".encode()
            cells = [*map(_of_cell, value.__closure__ or ())]
            yield from self._several(3, (value.__defaults__, value.__kwdefaults__, cells), depth)
        elif parts := _PARTS.get(type(value)):
            yield from self._several(len(parts), (getattr(value, part) for part in parts), depth)
        elif numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            yield from self._array(numpy.asarray(value), depth)
        elif torch is not None and isinstance(value, torch.Tensor):
            yield from _tensor(torch, value)
        elif type(value).__module__ == "hybridloader.records.shared_list":  # attributes: its memory
            items = (value[place] for place in drawn(len(value)))
            yield from self._several(len(value), items, depth)
        elif not isinstance(value, types.ModuleType):
            yield from self._attributes(value, depth)

    def _several(self, count: int, values: Iterable[Any], depth: int) -> Iterator[bytes]:
        yield b"%d" % count
        for value in values:
            yield from self.at(value, depth)

    def _container(self, value: Any, depth: int) -> Iterator[bytes]:
        """Read a container by the methods of its base class: those of a subclass may load data."""
        if isinstance(value, (set, frozenset)):
            yield b"%d" % len(value)
            if len(value) <= _ALL * _ALL:  # no order is the same in every run
                yield from sorted(b"|".join(_Look().at(item, depth)) for item in value)
            return
        if isinstance(value, dict):
            keys = [*islice(dict.__iter__(value), _ALL), *islice(dict.__reversed__(value), _ALL)]
            pairs = (part for key in keys for part in (key, dict.get(value, key)))
            yield from self._several(dict.__len__(value), pairs, depth)
        else:
            base: Any = next(b for b in (list, tuple, deque) if isinstance(value, b))
            count = base.__len__(value)
            items = (base.__getitem__(value, place) for place in drawn(count))
            yield from self._several(count, items, depth)
        yield from self._attributes(value, depth)

    def _attributes(self, value: Any, depth: int) -> Iterator[bytes]:
        """Yield the bytes for the attributes of the object itself, its slots too."""
        found = own_attributes(value)
        known = found.get("_fingerprint")
        if isinstance(known, str):  # of Hugging Face's datasets, which know what they were made of
            found = {"_fingerprint": known}
        for name in sorted(filter(lambda name: isinstance(name, str), found)):
            yield name.encode(errors="surrogatepass")
            yield from self.at(found[name], depth)

    def _array(self, array: Any, depth: int) -> Iterator[bytes]:
        yield f"{array.dtype} {array.shape}".encode()
        if array.dtype.hasobject:
            items = (array.flat[place] for place in drawn(array.size))
            yield from self._several(array.size, items, depth)
        elif array.size <= _ELEMENTS:
            yield array.tobytes()
        else:
            yield array.flat[_places(array.size, _ELEMENTS)].tobytes()


def _tensor(torch: Any, tensor: Any) -> Iterator[bytes]:
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(tensor.shape)
        description = f"{tensor.dtype} {shape} {tensor.layout}"
        # Reading from a device would wait for it.
        if tensor.layout is torch.strided and tensor.device.type == "cpu":
            try:
                tensor = tensor.detach()
                if tensor.numel() > _ELEMENTS:
                    places = torch.tensor(_places(tensor.numel(), _ELEMENTS), device="cpu")
                    tensor = tensor[torch.unravel_index(places, shape)]
                description += repr(tensor.tolist())
            except Exception:  # a kind of tensor that has no elements to show
                pass
    yield description.encode()


def _text(text: memoryview) -> Iterator[bytes]:
    most = _ALL * 1024
    yield b"%d" % len(text)
    yield bytes(text[:most]) + bytes(text[most:][-most:])


def _of_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
