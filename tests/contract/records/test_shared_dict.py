"""SharedDict answers as a dict with the same pairs does; other keys are refused by name."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.containers import Point, Text, few, ints, same, texts, values

from hybridloader.records import SharedDict

ODD_KEYS = [
    0, False, 0.0, -0.0, 1, True, 1.0, -1, 2**63, float(2**63), 2**64, -(2**63), 1e300, int(1e300),
    0.5, math.inf, None, "", "1", b"1", "\ud800", (), (1,), (True,), (1.0, "a"), ((), None),
]  # fmt: skip
keys = st.sampled_from(ODD_KEYS) | st.recursive(
    st.none() | st.booleans() | ints | st.floats(allow_nan=False) | texts | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
pair_lists = st.one_of(
    *(
        st.lists(st.tuples(k, values), max_size=20)
        for k in (keys, texts, ints, st.sampled_from("abc"))
    )
)


def check_against_dict(pairs: list[tuple[Any, Any]]) -> None:
    wanted, shared = dict(pairs), SharedDict(pairs)
    assert len(shared) == len(wanted)
    assert same(list(shared.items()), list(wanted.items()))
    assert same(list(shared), list(wanted))
    assert same(list(shared.values()), list(wanted.values()))
    for key in [*ODD_KEYS, *wanted, "absent", ("absent",)]:
        assert (key in shared) == (key in wanted)
        if key in wanted:
            assert same(shared[key], wanted[key])
            assert same(shared.get(key), wanted[key])
        else:
            assert shared.get(key, 17) == 17
            with pytest.raises(KeyError):
                shared[key]


@few
@given(pair_lists)
def test_a_dict_with_the_same_pairs_answers_the_same(pairs: list[tuple[Any, Any]]) -> None:
    check_against_dict(pairs)


@few
@given(pair_lists)
def test_keys_with_the_same_hash_are_told_apart(pairs: list[tuple[Any, Any]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for function in ("stable_hash", "crc32"):
            patch.setattr(f"hybridloader.records.containers.{function}", lambda key: 0)
        check_against_dict(pairs)


@few
@given(keys, keys)
def test_equal_keys_are_one(a: Any, b: Any) -> None:
    for x, y in ((a, b), (a, True), (a, 1.0), (-0.0, b)):
        assert len(SharedDict([(x, 1), (y, 2)])) == len({x: 1, y: 2})


def test_keys_of_numpy_and_other_kinds_find_what_they_equal() -> None:
    pairs = {1: "one", 0.5: "half", "a": "text", b"b": "raw", (1, "a"): "pair", 2**40: "big"}
    shared = SharedDict(pairs)
    for key in (
        np.int64(1), np.uint8(1), np.float32(0.5), np.float64(0.5), np.str_("a"), np.bytes_(b"b"),
        Text("a"), np.int64(2**40), (np.int64(1), np.str_("a")), Fraction(1, 2), Decimal("0.5"),
        1 + 0j, np.bool_(True), np.float64(1), np.int64(2), np.float32(0.1), object(), Point(1, 2),
        frozenset(), "b", b"a", 1 + 1j, (object(),),
    ):  # fmt: skip
        assert shared.get(key) == pairs.get(key), key
        assert (key in shared) == (key in pairs)
    unhashable: list[Any] = [[], {}, ([],)]
    for bad in unhashable:
        with pytest.raises(TypeError, match="unhashable"):
            shared.get(bad)


def test_a_nan_is_never_found() -> None:
    nan = math.nan
    shared = SharedDict([(nan, 1), (nan, 2), ((nan,), 3), (1.0, 4)])
    assert len(shared) == 4
    assert nan not in shared
    assert (nan,) not in shared
    assert float("nan") not in shared
    assert shared[1] == 4
    assert list(shared.values()) == [1, 2, 3, 4]


def test_other_keys_and_what_is_not_pairs_are_refused_by_name(shared_kind: str) -> None:
    for key in (Text("mine"), np.int64(5), Point(1, 2), frozenset([8]), (1, ("deep", Text("m")))):
        for source in ({"ok": 1, key: 2}, [("ok", 1), (key, 2)]):
            with pytest.raises(
                TypeError, match=r"the key .* is a .*keys of a SharedDict are str, b"
            ) as e:
                SharedDict(source)
            assert repr(key) in str(e.value)
    for bad in ([5], [(1, 2, 3)], ["a"]):
        with pytest.raises(TypeError, match="not a pair"):
            SharedDict(bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        SharedDict(5)  # type: ignore[arg-type]


def test_many_pairs_from_anywhere(shared_kind: str) -> None:
    wanted = {f"k{i}": (i, "\u00e9") for i in range(3000)}
    doubled = itertools.chain(((key, None) for key in wanted), wanted.items())
    for source in (wanted, iter(wanted.items()), MappingProxyType(wanted), doubled):
        shared = SharedDict(source)  # type: ignore[arg-type]
        assert shared == wanted
        assert list(shared) == list(wanted)
        assert shared["k2999"] == (2999, "\u00e9")
        assert "k3000" not in shared
        assert SharedDict(shared) == shared
    assert SharedDict({"a": "b" * 3000}).nbytes > SharedDict({"a": "b"}).nbytes + 2000


def test_its_views_are_those_of_a_dict() -> None:
    wanted = {"a": 1, "b": 2}
    shared = SharedDict(wanted)
    assert shared == wanted
    assert wanted == shared
    assert shared != {"a": 1}
    assert shared != {"a": 1, "c": 2}
    assert shared != {"a": 1, "b": 3}
    assert shared != [("a", 1), ("b", 2)]
    assert list(reversed(shared)) == ["b", "a"]
    assert list(reversed(shared.values())) == [2, 1]  # type: ignore[call-overload]
    assert list(reversed(shared.items())) == [("b", 2), ("a", 1)]  # type: ignore[call-overload]
    assert 2 in shared.values()
    assert 3 not in shared.values()
    assert ("a", 1) in shared.items()
    assert ("a", 2) not in shared.items()
    assert shared.keys() & {"a", "z"} == {"a"}
    with pytest.raises(TypeError, match="unhashable"):
        hash(shared)
    assert dict(SharedDict()) == dict(SharedDict({})) == {}
    assert "a" not in SharedDict()
