"""Sets of whole numbers as texts, for states: a bit for each number, compressed.

A set is the bits of an int: bit k stands for the number k.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable
from typing import Any

from hybridloader._support.user_objects import no_answer
from hybridloader.errors import StateError

LONGEST = 6_000
"""Characters of the longest text: a state is to stay below 10 KB."""


def packed(bits: int) -> str | None:
    """Return the text of a set; None if it would be longer than `LONGEST`."""
    if not bits:
        return ""
    data = zlib.compress(bits.to_bytes((bits.bit_length() + 7) // 8, "little"))
    return base64.b64encode(data).decode() if len(data) <= LONGEST // 4 * 3 else None


def unpacked(text: Any, name: str) -> int:
    """Return the set of a text of the operator `name`. Raises `StateError` if it is damaged."""
    try:
        data = zlib.decompress(base64.b64decode(text, validate=True)) if text else b""
    except Exception as error:
        raise no_answer(
            StateError(f"{name}: the numbers in the state are damaged: {error}")
        ) from error
    return int.from_bytes(data, "little")


def bits_of(numbers: Iterable[int]) -> int:
    """Return the set of `numbers`, none below 0."""
    found = bytearray()
    for number in numbers:
        place, bit = divmod(number, 8)
        if place >= len(found):
            found.extend(bytes(place + 1 - len(found)))
        found[place] |= 1 << bit
    return int.from_bytes(found, "little")


def numbers_in(bits: int) -> list[int]:
    """Return the numbers in a set, in order."""
    return [number for number, bit in enumerate(reversed(f"{bits:b}")) if bit == "1"]
