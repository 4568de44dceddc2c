"""`Permutation`: a random order of any size that is computed, not stored: a keyed bijection of range(n).

Each position is mapped independently, so nothing is stored, and any position is found at once. The
mapping only adds, multiplies, shifts and compares integers of 64 bits, so the order is the same on every
platform and with every numpy. It is for shuffling, not for secrets.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridloader._support.text import whole

Words = npt.NDArray[np.uint64]

LARGEST = 2**63 - 1  # largest length or epoch: the maximum of int64

MOST_SAMPLES = 2**62
"""Largest number of samples. It leaves room in int64 for an index and a number of ranks."""

BLOCK = 32_768
"""Positions to map at a time. With 4096 at a time a position takes 73 ns, mostly numpy's calls; with
this many 27; with 65,536 it takes 23 ns and twice the memory."""

TABLE = 4096
"""Size up to which the order is a table that is sorted by a hash: halves of a few bits mix badly."""

# Stafford's multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


def seed_of(value: Any) -> int:
    """Return `value` as a seed of 64 bits, such as that of ``torch.initial_seed()``."""
    return whole("seed", value, 0, 2**64 - 1)


def key_words(purpose: str, seed: int, epoch: int) -> Words:
    """Return eight words of 64 bits that depend on every bit of the arguments."""
    digest = hashlib.sha512(f"hybridloader/{purpose}/{seed}/{epoch}".encode()).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _mix(values: Words, key: np.uint64, out: Words, scratch: Words) -> None:
    """Write a hash of `values` into `out`; its high bits are well mixed."""
    np.add(values, key, out=out)
    np.multiply(out, _FIRST, out=out)
    np.right_shift(out, _HALF, out=scratch)
    np.bitwise_xor(out, scratch, out=out)
    np.multiply(out, _SECOND, out=out)


class Feistel:
    """A bijection of range(n): a Feistel network over the next power of 2, with cycle walking.

    A value that is not below `n` is mapped again until it is (Black and Rogaway, Ciphers with arbitrary
    finite domains, CT-RSA 2002): less than twice on average, as more than half of the domain is below
    `n`, which is at least 3. There is a key for each of 8 rounds. Over
    2,000,000 keys, a chi-square test of the difference between the values at two positions rejects 4
    rounds for up to 4096 elements, 6 for up to 256 and 8 for up to 64.
    """

    def __init__(self, n: int, keys: Words) -> None:
        bits = (n - 1).bit_length()
        low = bits // 2
        self._n = np.uint64(n)
        self._keys = keys
        self._low, self._low_mask = np.uint64(low), np.uint64((1 << low) - 1)
        self._to_low, self._to_high = np.uint64(64 - low), np.uint64(64 - (bits - low))

    def _network(self, values: Words) -> Words:
        low: Words = values & self._low_mask
        high: Words = values >> self._low
        mixed, scratch = np.empty_like(values), np.empty_like(values)
        for number, key in enumerate(self._keys):
            read, written = (high, low) if number % 2 else (low, high)
            _mix(read, key, mixed, scratch)
            np.right_shift(mixed, self._to_low if number % 2 else self._to_high, out=mixed)
            np.bitwise_xor(written, mixed, out=written)
        np.left_shift(high, self._low, out=high)
        np.bitwise_or(high, low, out=high)
        return high

    def __call__(self, positions: Words) -> Words:
        values = self._network(positions)
        outside = np.flatnonzero(values >= self._n)
        while outside.size:
            walked = self._network(values[outside])
            values[outside] = walked
            outside = outside[walked >= self._n]
        return values


class Permutation:
    """All numbers below `n` in random order, in constant memory.

    Parameters
    ----------
    n
        Size, from 0 to ``2**62``.
    seed, epoch, purpose
        Key of the order. Orders with different keys are unrelated.

    Examples
    --------
    >>> order = Permutation(2_000_000_000, seed=1)
    >>> order[0], order[-1]
    (1394210949, 1353743346)
    >>> order.read(1_000_000_000, 1_000_000_003).tolist()
    [1554815814, 183085957, 1003222784]
    >>> sorted(Permutation(5, seed=0))
    [0, 1, 2, 3, 4]
    """

    def __init__(self, n: int, seed: int, epoch: int = 0, *, purpose: str = "shuffle") -> None:
        self._n = whole("n", n, 0, MOST_SAMPLES)
        keys = key_words(purpose, seed_of(seed), whole("epoch", epoch, 0))
        self._map: Feistel | Words
        if self._n > TABLE:
            self._map = Feistel(self._n, keys)
            return
        hashed, scratch = np.empty(self._n, np.uint64), np.empty(self._n, np.uint64)
        _mix(np.arange(self._n, dtype=np.uint64), keys[0], hashed, scratch)
        _mix(hashed >> _HALF, keys[1], scratch, np.empty_like(hashed))
        np.bitwise_xor(hashed, scratch, out=hashed)
        self._map = np.argsort(hashed, kind="stable").astype(np.uint64)

    def __len__(self) -> int:
        return self._n

    def take(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the values at `positions`, which must be from 0 to below `n`."""
        values = np.empty(len(positions), np.int64)
        for start in range(0, len(positions), BLOCK):
            block = positions[start : start + BLOCK].astype(np.uint64)
            values[start : start + BLOCK] = (
                self._map(block) if isinstance(self._map, Feistel) else self._map[block]
            )
        return values

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the values from position `start` to before `stop`, as an array."""
        if not 0 <= start <= stop <= self._n:
            raise IndexError(f"no positions from {start} to {stop} in an order of {self._n}")
        return self.take(np.arange(start, stop, dtype=np.int64))

    def __getitem__(self, position: int) -> int:
        at = whole("a position", position, -LARGEST)
        at += self._n if at < 0 else 0
        if not 0 <= at < self._n:
            raise IndexError(f"no position {position} in an order of {self._n}")
        return int(self.read(at, at + 1)[0])

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self._n, BLOCK):
            yield from self.read(start, min(start + BLOCK, self._n)).tolist()


order_of = functools.lru_cache(maxsize=16)(Permutation)
"""Return a `Permutation` from a cache of recent ones; it never changes."""
