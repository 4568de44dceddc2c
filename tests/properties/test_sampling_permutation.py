"""The permutation: a bijection for every size and seed, and the same one everywhere; draws by weight."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridloader.sampling.permutation import BLOCK, TABLE, Feistel, Permutation, key_words
from hybridloader.sampling.weighted import uniform_draws

seeds = st.integers(0, 2**64 - 1)
WORD = 2**64 - 1
no_deadline = settings(deadline=None)


def _mix(value: int, key: int) -> int:
    value = (value + key) * 0xBF58476D1CE4E5B9 & WORD
    return (value ^ value >> 32) * 0x94D049BB133111EB & WORD


def by_hand(n: int, seed: int, epoch: int, purpose: str, position: int) -> int:
    """The definition, in Python's integers."""
    text = f"hybridloader/{purpose}/{seed}/{epoch}"
    digest = hashlib.sha512(text.encode()).digest()
    keys = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 64, 8)]
    if n <= TABLE:
        first = [_mix(i, keys[0]) for i in range(n)]
        return sorted(range(n), key=lambda i: first[i] ^ _mix(first[i] >> 32, keys[1]))[position]
    bits = (n - 1).bit_length()
    low_bits = bits // 2
    value = position
    while True:
        low, high = value & ((1 << low_bits) - 1), value >> low_bits
        for number, key in enumerate(keys):
            if number % 2:
                low ^= _mix(high, key) >> (64 - low_bits)
            else:
                high ^= _mix(low, key) >> (64 - (bits - low_bits))
        value = high << low_bits | low
        if value < n:
            return value


@no_deadline
@given(st.integers(3, 10_000), seeds)
def test_the_network_is_a_bijection_at_sizes_that_a_table_serves_too(n: int, seed: int) -> None:
    order = Feistel(n, key_words("test", seed, 0))(np.arange(n, dtype=np.uint64))
    assert np.array_equal(np.sort(order), np.arange(n, dtype=np.uint64))


def test_sizes_at_the_borders() -> None:
    for n in (*range(6), TABLE - 1, TABLE, TABLE + 1, 2 * TABLE, BLOCK, BLOCK + 1, 2 * BLOCK + 5):
        order = Permutation(n, 7)
        assert [*order] == order.read(0, n).tolist()
        assert sorted(order) == list(range(n))


@no_deadline
@given(st.integers(1, 2**62), seeds, st.integers(0, 2**63 - 1), st.data())
def test_values_are_those_of_the_definition(n: int, seed: int, epoch: int, data: Any) -> None:
    n = data.draw(st.sampled_from([n, 1 + n % (2 * TABLE)]))
    position = data.draw(st.integers(0, n - 1))
    expected = by_hand(n, seed, epoch, "shuffle", position)
    assert Permutation(n, seed, epoch)[position] == expected
    assert type(Permutation(n, seed, epoch)[position]) is int


@pytest.mark.parametrize(
    ("n", "seed", "epoch", "first"),
    [
        (10, 0, 0, [6, 5, 3, 4]),
        (TABLE, 1, 2, [1214, 1739, 1449, 2249]),
        (TABLE + 1, 1, 2, [238, 583, 1527, 1732]),
        (2_000_000_000, 1, 0, [1394210949, 442925604, 191259528, 1171687254]),
        (
            2**62,
            2**64 - 1,
            2**63 - 1,
            [101270490915066895, 921538727530155983, 1597561260531339257, 3628727644816499033],
        ),
    ],
)
def test_values_are_pinned(n: int, seed: int, epoch: int, first: list[int]) -> None:
    assert Permutation(n, seed, epoch).read(0, 4).tolist() == first


@no_deadline
@given(st.integers(1, 100_000), seeds, st.data())
def test_any_part_is_that_of_the_whole(n: int, seed: int, data: Any) -> None:
    order = Permutation(n, seed)
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, min(n, start + 100)))
    whole = order.read(0, n)
    assert np.array_equal(order.read(start, stop), whole[start:stop])
    assert [order[k] for k in range(start, stop)] == whole[start:stop].tolist()
    some = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), np.int64)
    assert np.array_equal(order.take(some), whole[some])
    assert order[-1] == whole[-1]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 6)])
def test_a_part_beyond_the_end_is_refused(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match=f"from {start} to {stop} in an order of 5"):
        Permutation(5, 0).read(start, stop)


# -- draws by weight --------------------------------------------------------------------------------


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 2**63 - 1))
@no_deadline
def test_a_draw_is_found_by_its_number(start: int, many: int, epoch: int) -> None:
    draws = uniform_draws(1, epoch, 0, 200)
    assert np.array_equal(uniform_draws(1, epoch, start, start + many), draws[start : start + many])
    assert draws.max() < 2**53
    assert uniform_draws(1, 2, 5, 8).tolist() == [
        3824433414576079,
        3856068560375613,
        8246293924363223,
    ]
