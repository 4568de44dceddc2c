"""SharedList answers as a list with the same elements does, and nothing changes it."""

from __future__ import annotations

import math
import operator
import pickle
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.containers import Text, few, lists, same, texts

from hybridloader.records import SharedDict, SharedList


def check_elements(elements: list[Any]) -> None:
    shared = SharedList(iter(elements))
    assert len(shared) == len(elements)
    assert same(list(shared), elements)
    assert same([shared[i] for i in range(len(elements))], elements)
    assert same(list(reversed(shared)), elements[::-1])


@few
@given(lists)
def test_every_element_comes_back_with_its_type_and_value(elements: list[Any]) -> None:
    check_elements(elements)


KINDS: list[list[Any]] = [
    [1, -(2**63), 2**63 - 1], [1, 2**63], [1, True], [True], [1.5, -0.0, math.inf], [1.5, 1],
    ["a", "", "\u00e9", "\ud800", "\U0001f600"], ["a", Text("b")], [b"", b"\0\xff"],
    [bytearray(b"a")], [],
]  # fmt: skip


def test_elements_of_one_kind_or_of_several_come_back(shared_kind: str) -> None:
    for elements in KINDS:
        check_elements(elements)
    for numbers in (range(5000), [0.5] * 5000):
        assert SharedList(numbers).nbytes < 9 * 5000
        assert SharedList([*numbers, None]).nbytes > 9 * 5000


def test_another_kind_may_come_late(shared_kind: str) -> None:
    for first, later in product((7, 1.5, "t\u00e9xt", b"raw"), ("text", 2**70, None)):
        for count in 1, 4, 5, 6, 9000:
            check_elements([first] * count + [later, first])


class Instance:
    """Pickled as nothing."""

    def __reduce__(self) -> Any:
        return int, ()


def test_a_generator_never_becomes_a_list() -> None:
    alive, most = weakref.WeakSet[Instance](), 0

    def generate() -> Iterator[Instance]:
        nonlocal most
        for _ in range(50_000):
            alive.add(instance := Instance())
            yield instance
            most = max(most, len(alive))

    # Of what is pickled small, up to 8192 are taken at a time.
    assert SharedList(generate()) == [0] * 50_000
    assert 1 <= most <= 2 * 8192 + 1


def test_large_elements_are_taken_a_megabyte_at_a_time() -> None:
    tracemalloc.start()
    try:
        shared = SharedList(bytes([i]) * (1 << 17) for i in range(200))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert [shared[i][-1] for i in range(200)] == list(range(200))


@few
@given(st.lists(texts, max_size=30), st.slices(30), st.slices(30), st.integers(-35, 35))
def test_slices_are_those_of_a_list(
    elements: list[str], first: slice, second: slice, place: int
) -> None:
    shared = SharedList(elements)
    for mine, plain in (
        (shared[first], elements[first]),
        (shared[first][second], elements[first][second]),
        (shared[::-1][first], elements[::-1][first]),
    ):
        assert isinstance(mine, SharedList)
        assert mine._buffer is shared._buffer
        assert list(mine) == plain
        assert list(pickle.loads(pickle.dumps(mine))) == plain
        assert len(mine) == len(plain)
        try:
            wanted = plain[place]
        except IndexError:
            with pytest.raises(IndexError):
                mine[place]
        else:
            assert mine[place] == wanted


@pytest.mark.parametrize("elements", [[3, 1, 2, 1], [0.5, 2.0], ["b", "a"], [None, (1, 2), "x"]])
def test_it_is_a_sequence_like_a_list(elements: list[Any]) -> None:
    shared = SharedList(elements)
    for value in [*elements, "no such", 77]:
        assert (value in shared) == (value in elements)
        assert shared.count(value) == elements.count(value)
        for bounds in [(), (1,), (-2,), (0, 1), (1, -1), (-100, 100)]:
            try:
                wanted = elements.index(value, *bounds)
            except ValueError:
                with pytest.raises(ValueError, match="is not in the SharedList"):
                    shared.index(value, *bounds)
            else:
                assert shared.index(value, *bounds) == wanted
    assert shared == elements
    assert shared == tuple(elements)
    assert shared == SharedList(elements)
    assert shared != elements[:-1]
    assert shared != [*elements[:-1], "other"]
    assert shared[1:] == elements[1:]
    assert shared[1:] != shared[:-1]
    assert (shared == iter(elements)) is False
    with pytest.raises(TypeError, match="unhashable"):
        hash(shared)


def test_indices_are_what_a_list_takes() -> None:
    shared: Any = SharedList(["a", "b", "c"])
    assert shared[np.int64(1)] == "b"
    assert shared[np.uint8(2)] == "c"
    assert shared[True] == "b"
    assert shared[-3] == "a"
    with pytest.raises(IndexError, match=r"index 3 is out of range: the SharedList has 3 elements"):
        shared[3]
    with pytest.raises(IndexError, match=r"index -4 "):
        shared[-4]
    with pytest.raises(IndexError):
        shared[10**30]
    for bad in ("0", 1.0, None, (0,), ..., slice("a")):
        with pytest.raises(TypeError):
            shared[bad]
    with pytest.raises(TypeError, match="integers or slices, not tuple"):
        shared[(0,)]


def test_nothing_changes_it() -> None:
    shared: Any = SharedList([1, 2])
    mapping: Any = SharedDict({1: 2})
    changes: list[Callable[[], Any]] = [
        lambda: operator.setitem(shared, 0, 1),
        lambda: operator.delitem(shared, 0),
        lambda: shared.append(3),
        lambda: shared.sort(),
        lambda: operator.setitem(mapping, 1, 1),
        lambda: operator.delitem(mapping, 1),
        lambda: mapping.update({}),
        lambda: mapping.pop(1),
    ]
    for change in changes:
        with pytest.raises((TypeError, AttributeError)):
            change()
    with pytest.raises(TypeError):
        shared += [3]
    assert not hasattr(shared, "append")
    with pytest.raises((TypeError, ValueError)):
        shared._data[0] = 1
    assert list(shared) == [1, 2]
    assert dict(mapping) == {1: 2}


def test_its_repr_is_short() -> None:
    assert repr(SharedList([1, 2, 3])) == "SharedList([1, 2, 3])"
    assert repr(SharedList(range(1234))) == "SharedList([0, 1, 2, ... 1,234 in all])"
    assert repr(SharedDict({"a": 1})) == "SharedDict({'a': 1})"
    assert len(repr(SharedList(["x" * 10_000] * 5))) < 300
    assert len(repr(SharedDict({"x" * 10_000: "y" * 10_000}))) < 300


def test_an_error_of_the_iterable_leaves_nothing(shared_kind: str) -> None:
    def fail() -> Iterator[Any]:
        yield from range(10_000)
        yield "another kind"
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        SharedList(fail())
    with pytest.raises(TypeError):
        SharedList(5)  # type: ignore[arg-type]
    with pytest.raises(Exception, match="pickle"):
        SharedList([threading.Lock()])
    increment: Any = SharedList([lambda x: x + 1, 5])[0]  # which only cloudpickle can pickle
    assert increment(1) == 2


def test_threads_read_at_the_same_time() -> None:
    elements = [f"{i:05}" for i in range(3000)]
    shared, mapping = SharedList(elements), SharedDict(zip(elements, range(3000), strict=True))

    def read(_: int) -> Any:
        return list(shared), [shared[i] for i in range(3000)], [mapping[e] for e in shared]

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(read, range(4))] == [(elements, elements, [*range(3000)])] * 4
