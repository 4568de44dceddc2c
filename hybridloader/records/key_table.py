"""A hash table that every process can read: which keys there can be, their hash, where an entry is.

Python randomises the hashes of texts per process, so the hash here is its own. It agrees with
Python's equality: 1, 1.0 and True are one key. The table is open addressing with linear probing and
lies in one array of 64-bit words: the hash above, the entry's number plus one below, 0 where there is
none. It is filled once; nothing is ever removed or rehashed.
"""

from __future__ import annotations

import operator
import struct
from array import array
from collections.abc import Callable, Iterable
from typing import Any
from zlib import crc32

KEYS = "str, bytes, int, float, bool, None and tuples of these"

PLAIN = frozenset([str, bytes, int, float, bool, type(None)])

_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: what neighbours are multiplied with lies far apart (Knuth, The Art
of Computer Programming 3, 6.4)."""

LOW = 0xFFFFFFFF
SPREAD = 0x9E3779B1
"""The same for 32 bits. A CRC is linear, so the names of numbered files would lie in clusters."""


def is_plain(key: Any) -> bool:
    """Whether `key` may be a key: its type is one of `KEYS` exactly."""
    kind = type(key)
    return kind in PLAIN or (kind is tuple and all(map(is_plain, key)))


def as_plain(key: Any) -> Any:
    """The possible key that `key` is equal to, such as 3 for numpy's 3.

    Raises
    ------
    TypeError
        It can't be hashed.
    LookupError
        There is none.
    """
    if is_plain(key):
        return key
    value = hash(key)
    for kind, convert in _CONVERSIONS:
        if isinstance(key, kind):
            try:
                found = convert(key)
                if is_plain(found) and hash(found) == value and bool(found == key):
                    return found
            except Exception:  # what a foreign __index__, __float__ or __eq__ raises
                continue
    raise LookupError


_CONVERSIONS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (bytes, lambda key: bytes(memoryview(key))),
    (tuple, lambda key: tuple(map(as_plain, tuple.__iter__(key)))),
    (complex, operator.attrgetter("real")),
    (object, operator.index),
    (object, float),
)


def hash_text(raw: bytes) -> int:
    """The hash of a str, of which `raw` is the UTF-8 form; 32 bits.

    CRC-32 takes 0.1 microseconds for a path of 60 bytes where blake2b takes 0.5. Whatever has the
    same hash is told apart by looking at the key.
    """
    return crc32(raw)


def stable_hash(key: Any) -> int:
    """32 bits, the same in every process, the same for equal keys. `key` is plain."""
    kind = type(key)
    if kind is str:
        return crc32(key.encode("utf-8", "surrogatepass"))
    if kind is int or kind is bool:
        number: int = key
        if -(1 << 63) <= number < 1 << 63:
            return (number * _GOLDEN & 0xFFFFFFFFFFFFFFFF) >> 32
        return crc32(number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True), 1)
    if kind is float:
        return stable_hash(int(key)) if key.is_integer() else crc32(struct.pack("<d", key), 2)
    if kind is bytes:
        return crc32(key, 3)
    if kind is tuple:
        return crc32(struct.pack(f"<{len(key)}I", *map(stable_hash, key)), 4)
    return 5  # None


def table_bits(count: int) -> int:
    """The table for `count` entries has two to the power of this many words; two thirds fill it."""
    return max(3, (count * 3 // 2).bit_length())


def fill(
    hashes: Iterable[int], count: int, same: Callable[[int, int], bool]
) -> tuple[array[int], dict[int, int]]:
    """Make the table of `count` entries.

    Parameters
    ----------
    same
        Whether the keys of two entries are equal.

    Returns
    -------
    table
    again
        For each entry whose key had come before, the entry that it had come in first.
    """
    bits = table_bits(count)
    table = array("Q", bytes(8 << bits))
    again: dict[int, int] = {}
    shift, mask = 32 - bits, (1 << bits) - 1
    for entry, value in enumerate(hashes):
        slot = (value * SPREAD & LOW) >> shift
        while word := table[slot]:
            if word >> 32 == value and same((word & LOW) - 1, entry):
                again[entry] = (word & LOW) - 1
                break
            slot = (slot + 1) & mask
        else:
            table[slot] = value << 32 | (entry + 1)
    return table, again
