"""SharedList and SharedDict: exact round trips, one copy for all processes, nothing left behind."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import multiprocessing
import operator
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import cloudpickle
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridloader.records import large, shared_buffer, shared_dict
from hybridloader.records.columns import Column
from hybridloader.records.large import hint_at_large_container, largest_container
from hybridloader.records.shared_buffer import BufferGone
from hybridloader.records.shared_dict import SharedDict
from hybridloader.records.shared_list import SharedList

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


class Text(str):
    """A user's own kind of str."""


class Point(NamedTuple):
    x: int
    y: int


class Instances:
    """Counts how many of it live; pickled as nothing."""

    alive: ClassVar[weakref.WeakSet[Instances]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)

    def __reduce__(self) -> Any:
        return int, ()


@pytest.fixture(params=["nameless", "named"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of shared memory that containers of this test are made in."""
    kind: str = request.param
    if kind == "nameless" and not shared_buffer.nameless_usable():
        pytest.skip("there is no memfd, or no /proc")
    monkeypatch.setattr(shared_buffer, "nameless_usable", lambda: kind == "nameless")
    return kind


def same(a: Any, b: Any) -> bool:
    """Of the same type and value, NaN and the sign of zero included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or (a != a and b != b))
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def run(code: str, given: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run `code` in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        input=given,
        capture_output=True,
        env={**os.environ, **env},
        timeout=60,
        cwd="/",
        check=False,
    )


def output(code: str, given: bytes = b"", **env: str) -> str:
    done = run(code, given, **env)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    return done.stdout.decode().strip()


def forked(work: Callable[[], Any]) -> Any:
    """What `work` gives in a forked child, which ends by its own garbage collection, then `_exit`."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: threads and fork
        pid = os.fork()
    if pid == 0:
        try:
            with open(writing, "wb") as file:
                pickle.dump(work(), file)
            gc.collect()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    return pickle.loads(data)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:hybridloader")


def segments(pid: int | None = None) -> set[str]:
    """Those of one process; other tests may run on this machine."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"hl-{pid or os.getpid()}-")}


texts = st.text(st.characters(), max_size=12)  # lone surrogates too
ints = st.integers() | st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1])
scalars = st.none() | st.booleans() | ints | st.floats() | texts | st.binary(max_size=12)
values = scalars | st.tuples(scalars, scalars) | st.lists(scalars, max_size=3)
lists = st.one_of(*(st.lists(kind, max_size=20) for kind in (ints, st.floats(), texts, values)))
few = settings(max_examples=60, deadline=None)


# ------------------------------------------------------------------------------------- SharedList


@few
@given(lists)
def test_every_element_comes_back_with_its_type_and_value(elements: list[Any]) -> None:
    shared = SharedList(elements)
    assert len(shared) == len(elements)
    assert same(list(shared), elements)
    assert same([shared[i] for i in range(len(elements))], elements)
    assert same(list(reversed(shared)), elements[::-1])


@pytest.mark.parametrize(
    ("elements", "kind"),
    [
        ([1, -(2**63), 2**63 - 1], "int"),
        ([1, 2**63], "pickle"),
        ([1, True], "pickle"),
        ([True], "pickle"),
        ([1.5, -0.0, math.inf], "float"),
        ([1.5, 1], "pickle"),
        (["a", "", "\u00e9", "\ud800", "\U0001f600"], "str"),
        (["a", Text("b")], "pickle"),
        ([b"", b"\0\xff"], "bytes"),
        ([bytearray(b"a")], "pickle"),
        ([], "pickle"),
    ],
)
def test_the_kind_is_that_of_all_elements(elements: list[Any], kind: str, memory: str) -> None:
    shared = SharedList(elements)
    assert shared._layout.kind == kind
    assert same(list(shared), elements)
    assert same([shared[i] for i in range(len(elements))], elements)


@pytest.mark.parametrize("first", [7, 1.5, "t\u00e9xt", b"raw"])
@pytest.mark.parametrize("later", ["text", 2**70, None])
@pytest.mark.parametrize("count", [1, 4, 5, 6, 20_000])
def test_another_kind_may_come_late(first: Any, later: Any, count: int, memory: str) -> None:
    elements = [first] * count + [later, first]
    shared = SharedList(iter(elements))
    assert same(list(shared), elements)
    assert same(shared[count], later)
    assert same(shared[count + 1], first)


def test_what_only_cloudpickle_can_pickle() -> None:
    shared = SharedList([lambda x: x + 1, 5])
    increment: Any = shared[0]
    assert increment(1) == 2
    assert shared[1] == 5


def test_a_generator_never_becomes_a_list() -> None:
    most = 0

    def generate() -> Iterator[Instances]:
        nonlocal most
        for _ in range(50_000):
            yield Instances()
            most = max(most, len(Instances.alive))

    # Of what is pickled small, up to 8192 are taken at a time.
    assert SharedList(generate()) == [0] * 50_000
    assert 1 <= most <= 2 * 8192 + 1


def test_large_elements_are_taken_one_by_one() -> None:
    taken = 0

    def generate() -> Iterator[bytes]:
        nonlocal taken
        for i in range(200):
            taken += 1
            yield bytes([i]) * (1 << 17)

    pieces: list[int] = []
    column = Column("test")
    add = column.add

    def noted(chunk: Any) -> None:
        pieces.append(len(chunk))
        add(chunk)

    column.add = noted  # type: ignore[method-assign]
    column.extend(generate())
    assert pieces[:2] == [1, 4]
    column.close()
    assert set(pieces[2:-1]) == {8}  # a megabyte
    assert taken == 200


@few
@given(
    st.lists(texts, max_size=30),
    st.slices(30),
    st.slices(30),
    st.integers(-35, 35),
)
def test_slices_are_those_of_a_list(
    elements: list[str], first: slice, second: slice, place: int
) -> None:
    shared = SharedList(elements)
    for mine, lists in (
        (shared[first], elements[first]),
        (shared[first][second], elements[first][second]),
        (shared[::-1][first], elements[::-1][first]),
    ):
        assert isinstance(mine, SharedList)
        assert mine._buffer is shared._buffer
        assert list(mine) == lists
        assert list(pickle.loads(pickle.dumps(mine))) == lists
        assert len(mine) == len(lists)
        try:
            wanted = lists[place]
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
        with pytest.raises(TypeError, match=r"can't be changed.*(list|dict)\(shared\)"):
            change()
    with pytest.raises(TypeError):
        shared += [3]
    assert not hasattr(shared, "append")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = shared.nothing
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


def test_an_error_of_the_iterable_leaves_nothing(memory: str) -> None:
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


def test_threads_read_at_the_same_time() -> None:
    elements = [f"{i:05}" for i in range(3000)]
    shared, mapping = SharedList(elements), SharedDict(zip(elements, range(3000), strict=True))
    found: list[Any] = []

    def read() -> None:
        found.append((list(shared), [shared[i] for i in range(3000)], [mapping[e] for e in shared]))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(elements, elements, list(range(3000)))] * 4


# ------------------------------------------------------------------------------------- SharedDict

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


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(pair_lists)
def test_keys_with_the_same_hash_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, pairs: list[tuple[Any, Any]]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shared_dict, "stable_hash", lambda key: 0)
        patch.setattr(shared_dict, "crc32", lambda raw: 0)
        check_against_dict(pairs)


@few
@given(keys, keys)
def test_equal_keys_have_equal_hashes(a: Any, b: Any) -> None:
    for x, y in ((a, b), (a, True), (a, 1.0), (-0.0, b)):
        if x == y:
            assert shared_dict.stable_hash(x) == shared_dict.stable_hash(y)
    assert 0 <= shared_dict.stable_hash(a) < 2**31


def test_keys_of_numpy_and_other_kinds_find_what_they_equal() -> None:
    pairs = {1: "one", 0.5: "half", "a": "text", b"b": "raw", (1, "a"): "pair", 2**40: "big"}
    shared = SharedDict(pairs)
    from decimal import Decimal
    from fractions import Fraction

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


@pytest.mark.parametrize(
    "key", [Text("mine"), np.int64(5), Point(1, 2), frozenset([8]), (1, ("deep", Text("mine"))), 1j]
)
def test_other_keys_are_refused_by_name(key: Any, memory: str) -> None:
    for source in ({"ok": 1, key: 2}, [("ok", 1), (key, 2)]):
        with pytest.raises(
            TypeError, match=r"the key .* is a .*keys of a SharedDict are str, b"
        ) as e:
            SharedDict(source)
        assert repr(key) in str(e.value)


def test_what_is_not_pairs_is_refused() -> None:
    for bad in ([5], [(1, 2, 3)], ["a"]):
        with pytest.raises(TypeError, match="not a pair"):
            SharedDict(bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        SharedDict(5)  # type: ignore[arg-type]


def test_many_pairs_from_anywhere(memory: str) -> None:
    wanted = {f"k{i}": (i, "\u00e9") for i in range(30_000)}
    from types import MappingProxyType

    class Keyed:
        def keys(self) -> Any:
            return wanted.keys()

        def __getitem__(self, key: str) -> Any:
            return wanted[key]

    doubled = itertools.chain(((key, None) for key in wanted), wanted.items())
    for source in (wanted, iter(wanted.items()), MappingProxyType(wanted), Keyed(), doubled):
        shared = SharedDict(source)  # type: ignore[arg-type]
        assert shared == wanted
        assert list(shared) == list(wanted)
        assert shared["k29999"] == (29999, "\u00e9")
        assert "k30000" not in shared
        assert SharedDict(shared) == shared


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


# ------------------------------------------------------------------------- pickled by reference

READ = """
import pickle, sys
shared = pickle.load(sys.stdin.buffer)
"""


def test_a_pickle_of_a_million_is_tiny(memory: str) -> None:
    shared = SharedList(f"/data/{i}" for i in range(1_000_000))
    for dump in (pickle.dumps, cloudpickle.dumps):
        assert len(dump(shared)) < 2048
        assert len(dump(shared[5:900_000:7])) < 2048
        back = pickle.loads(dump(shared))
        assert back._buffer is shared._buffer
        assert back == shared
    mapping = SharedDict(zip(shared[:1000], shared[:1000], strict=True))
    assert len(pickle.dumps(mapping)) < 2048
    assert pickle.loads(pickle.dumps(mapping))["/data/77"] == "/data/77"


def test_copies_are_the_thing_itself() -> None:
    shared, mapping = SharedList([[1]]), SharedDict({1: [1]})
    for thing in (shared, mapping):
        assert copy.copy(thing) is thing
        assert copy.deepcopy({"in": thing})["in"] is thing
    assert shared[0] is not shared[0]


@pytest.mark.parametrize("seed", ["1", "2"])
def test_another_process_reads_it_whatever_its_hash_seed(memory: str, seed: str) -> None:
    things = (
        SharedList(["a", "b\u00e9", "c"])[::-1],
        SharedDict({"x": 1.5, ("y", 2): b"raw", 2**80: None}),
        SharedDict({f"key {i}": i for i in range(2000)}),
    )
    code = READ + (
        "l, d, e = shared\n"
        "assert all(e[f'key {i}'] == i for i in range(2000))\n"
        "print(ascii(list(l)), dict(d), d['x'], d[('y', 2.0)], d[2**80], 'z' in d)\n"
    )
    assert output(code, pickle.dumps(things), PYTHONHASHSEED=seed) == (
        "['c', 'b\\xe9', 'a'] {'x': 1.5, ('y', 2): b'raw', 1208925819614629174706176: None} "
        "1.5 b'raw' None False"
    )
    assert list(things[0]) == ["c", "b\u00e9", "a"]


def test_reading_imports_neither_torch_nor_numpy(memory: str) -> None:
    things = SharedList(["a"]), SharedDict({"a": (1, 2)}), SharedList([1]), SharedList([0.5])
    heavy = "print(sorted({'torch', 'numpy', 'loky', 'cloudpickle'} & set(sys.modules)))"
    code = READ + "l, d, i, f = shared; l[0], d['a'], 5 in d, list(i), f[0], d == {}\n" + heavy
    assert output(code, pickle.dumps(things)) == "[]"
    make = "import sys\nfrom hybridloader import SharedDict, SharedList\n"
    make += "SharedList('ab'); SharedDict({1: 2})\n"
    assert output(make + heavy) == "[]"


def worker_reads(shared: Any, place: Any) -> Any:
    """In a process: what lies there, how much of it is mapped, and the thing itself."""
    return shared[place], type(shared).__name__, shared


def spawned(shared: Any, answers: Any) -> None:
    answers.send(worker_reads(shared, 1))
    answers.recv()  # until the parent has read what was sent


def test_spawned_processes_read_it_and_send_it_back(memory: str) -> None:
    context = multiprocessing.get_context("spawn")
    shared = SharedList(["a", "b", "c"])
    here, there = context.Pipe()
    child = context.Process(target=spawned, args=(shared, there))
    child.start()
    element, name, back = here.recv()
    assert (element, name) == ("b", "SharedList")
    assert back._buffer is shared._buffer
    here.send(None)
    child.join()
    assert child.exitcode == 0
    child.close()
    here.close()
    there.close()
    assert list(shared) == ["a", "b", "c"]


def test_loky_reads_it(memory: str) -> None:
    from loky import ProcessPoolExecutor

    with ProcessPoolExecutor(max_workers=1, timeout=None) as pool:
        shared, mapping = SharedList(["a", "b"]), SharedDict({"k": [1]})
        assert pool.submit(worker_reads, shared, 1).result()[:2] == ("b", "SharedList")
        assert pool.submit(worker_reads, mapping, "k").result()[0] == [1]
        # cloudpickle, by value
        assert pool.submit(lambda: [x + "!" for x in shared[::-1]]).result() == ["b!", "a!"]


class Paths:
    """A dataset over a list of paths."""

    def __init__(self, paths: Any) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[int, str]:
        return index, self.paths[index]


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.full), "fork"])
def test_torchs_own_loader_takes_it(memory: str, method: str) -> None:
    import torch

    dataset = Paths(SharedList(f"p{i}" for i in range(6)))
    loader: Any = torch.utils.data.DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_size=3,
        num_workers=1,
        multiprocessing_context=method,
        collate_fn=list,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        batches = list(loader)
    assert batches == [[(i, f"p{i}") for i in range(k, k + 3)] for k in (0, 3)]


def test_a_forked_child_reads_and_pickles_it_and_takes_nothing_along(memory: str) -> None:
    holder: list[Any] = [SharedList(["a", "b", "c"]), SharedDict({"a": 1})]

    def in_child() -> Any:
        found = (
            list(holder[0]),
            dict(holder[1]),
            pickle.dumps(holder[0]),
            pickle.dumps(holder[0][1:]),
        )
        fresh = SharedList([1, 2])
        assert pickle.loads(pickle.dumps(fresh)) == [1, 2]
        holder.clear()
        del fresh
        gc.collect()
        return found

    elements, pairs, whole, part = forked(in_child)
    assert (elements, pairs) == (["a", "b", "c"], {"a": 1})
    assert pickle.loads(whole)._buffer is holder[0]._buffer
    # The name or the descriptor is still there for a process that has not mapped it yet:
    assert output(READ + "print(list(shared))", part) == "['b', 'c']"
    assert output(READ + "print(list(shared))", pickle.dumps(holder[0])) == "['a', 'b', 'c']"


MAKE = """
import pickle, sys
from hybridloader.records import shared_buffer
shared_buffer.nameless_usable = lambda: {nameless}
from hybridloader import SharedDict, SharedList
shared = SharedList(['a', 'b', 'c'])
sys.stdout.buffer.write(pickle.dumps(shared))
sys.stdout.flush()
"""


def owner(memory: str, rest: str = "sys.stdin.read()") -> subprocess.Popen[bytes]:
    """A process that has made a list and sent its pickle, and then does the `rest`."""
    code = MAKE.format(nameless=memory == "nameless") + rest
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
    )


def test_a_reader_outlives_the_owner_and_what_comes_later_is_told(memory: str) -> None:
    with owner(memory) as process:
        assert process.stdout is not None
        received = pickle.loads(pickled := read_pickle(process.stdout))
        late = pickle.loads  # in this process it is known, so it can still be opened by its pickle
        assert late(pickled)._buffer is received._buffer
        process.communicate()
    assert list(received) == ["a", "b", "c"]
    again = pickle.dumps(received[::2])
    if memory == "nameless":  # this process has it open, so others can get it here
        assert output(READ + "print(list(shared))", again) == "['a', 'c']"
        assert forked(partial(print_first, received)) == "a"
    del received
    for data in (pickled, again):
        with pytest.raises(
            BufferGone, match=r"(has ended|has let go of it).*pickle list\(shared\)"
        ):
            pickle.loads(data)


def print_first(shared: Any) -> str:
    return output(READ + "print(shared[0])", pickle.dumps(shared))


def read_pickle(stream: Any) -> bytes:
    """One pickle from a pipe that stays open."""
    data = b""
    while True:
        data += os.read(stream.fileno(), 1 << 16)
        try:
            pickle.loads(data)
        except (EOFError, pickle.UnpicklingError):
            continue
        return data


@linux
def test_the_errors_say_which_process_it_was() -> None:
    with owner("nameless") as process:
        assert process.stdout is not None
        pickled = read_pickle(process.stdout)
        process.communicate()
    with pytest.raises(BufferGone, match=rf"made this SharedList \({process.pid}\) has ended"):
        pickle.loads(pickled)
    mapping = SharedDict({1: 2})
    pickled = pickle.dumps(mapping)
    del mapping
    with pytest.raises(BufferGone, match=rf"process {os.getpid()}, which had it, has let go"):
        pickle.loads(pickled)


@linux
def test_other_memory_is_never_taken_for_its_own(tmp_path: Path) -> None:
    shared, other = SharedList(["aaa"]), SharedList(["bbb"])
    mine, others = shared._buffer._ticket, other._buffer._ticket
    assert mine.size == others.size
    del shared
    pipe = os.pipe()
    try:
        for places in (others.places, ((os.getpid(), pipe[0]),), ((2**22 + 1, 0),)):
            with pytest.raises(BufferGone):  # the number is another file's now
                shared_buffer.open_ticket(*mine._replace(places=places))
        with pytest.raises(BufferGone):  # and even its inode
            shared_buffer.open_ticket(*mine._replace(places=others.places, file=others.file))
    finally:
        os.close(pipe[0])
        os.close(pipe[1])
    opened = shared_buffer.open_ticket(*others)
    assert opened is other._buffer


# ------------------------------------------------------------------------------------ its memory


@linux
def test_the_memory_goes_with_the_last_view(memory: str) -> None:
    names, maps, descriptors = segments(), mappings(), len(os.listdir("/proc/self/fd"))
    shared: Any = SharedList(str(i) for i in range(1000))
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1
    assert mappings() == maps + (memory == "nameless")
    assert len(segments() - names) == (memory == "named")
    part = shared[10:20][::3]
    iterator = iter(part)
    del shared
    assert list(part) == ["10", "13", "16", "19"]
    del part
    assert next(iterator) == "10"
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1
    del iterator
    gc.collect()
    assert mappings() == maps
    assert segments() == names
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_the_interpreter_ends_in_silence_and_leaves_nothing(memory: str) -> None:
    rest = (
        "kept = [shared, SharedDict({1: shared[0]}), shared[1:]]\n"
        "cycle = [shared]; cycle.append(cycle)\n"
        "iterator = iter(shared); next(iterator)\n"
        "sys.stdin.read()\n"
    )
    with owner(memory, rest) as process:
        assert process.stdout is not None
        read_pickle(process.stdout)
        assert bool(segments(process.pid)) == (memory == "named")
        _, errors = process.communicate()
    assert (process.returncode, errors) == (0, b"")
    assert not segments(process.pid)


def test_a_killed_owner_of_a_name_leaves_none() -> None:
    with owner("named") as process:
        assert process.stdout is not None
        pickled = read_pickle(process.stdout)
        assert len(segments(process.pid)) == 1
        process.send_signal(signal.SIGKILL)
        process.communicate()  # also waits for the resource tracker, which has the same stderr
    assert not segments(process.pid)
    with pytest.raises(BufferGone, match="has ended"):
        pickle.loads(pickled)


def test_who_attaches_does_not_take_the_name_away() -> None:
    with owner("named") as process:
        assert process.stdout is not None
        pickled = read_pickle(process.stdout)
        for _ in range(2):  # the first one's end must not concern the second
            assert output(READ + "print(shared[0])", pickled) == "a"
        _, errors = process.communicate()
    assert errors == b""


LIMITED = """
import resource, sys
from hybridloader.records import shared_buffer
shared_buffer.nameless_usable = lambda: {nameless}
from hybridloader import SharedList
from pathlib import Path
pages = int(Path('/proc/self/statm').read_text().split()[0])
most = pages * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
try:
    SharedList(bytes(1 << 20) for _ in range(200))
except MemoryError as error:
    print(error)
"""


@linux
def test_without_address_space_it_is_a_memory_error_that_names_the_size() -> None:
    text = output(LIMITED.format(nameless=True))
    found = re.fullmatch(r"a SharedList needs ([\d,]+) bytes of shared memory.*", text)
    assert found is not None
    assert 200 << 20 <= int(found[1].replace(",", "")) < 201 << 20


@linux
def test_without_memory_it_is_a_memory_error_and_nothing_is_left(memory: str) -> None:
    import resource

    before = segments(), len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        for make in (
            lambda: SharedList(bytes(1000) for _ in range(3000)),
            lambda: SharedDict((i, bytes(1000)) for i in range(3000)),
        ):
            with pytest.raises(MemoryError, match=r"a Shared\w+ needs [\d,]{6,} bytes.*too large"):
                make()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    gc.collect()
    assert (segments(), len(os.listdir("/proc/self/fd"))) == before


def private_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(int(n) for n in re.findall(r"Private_\w+:\s+(\d+) kB", text))


def grown(sequence: Any) -> int:
    """In a child: bytes that reading everything made its own."""
    gc.disable()
    before = private_bytes()
    for element in sequence:
        _ = element
    for place in range(0, len(sequence), 3):
        _ = sequence[place]
    return private_bytes() - before


@linux
def test_children_that_read_all_of_it_copy_nothing(memory: str) -> None:
    paths = [f"/data/train/class {i % 1000:04}/image {i:07}.jpeg" for i in range(200_000)]
    shared = SharedList(paths)
    assert sum(1 for _ in shared) == len(paths)  # a page that only one process maps is its own
    # The measure itself: a Python list is copied, at least 40 bytes of every 100.
    assert forked(lambda: grown(paths)) > 0.4 * sum(map(sys.getsizeof, paths))
    for _ in range(2):
        assert forked(lambda: grown(shared)) < 0.2 * shared.nbytes


# --------------------------------------------------------------------------- the hint at copies


class Trap:
    """Whose code must not be run."""

    __slots__ = ("__dict__", "slot", "unset")

    def __init__(self) -> None:
        self.slot: Any = None

    @property
    def prop(self) -> Any:
        raise AssertionError("a property was read")

    def __len__(self) -> int:
        raise AssertionError("len was called")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("getattr was called")

    def __iter__(self) -> Any:
        raise AssertionError("it was iterated")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("it was compared")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise AssertionError("repr was called")


class Odd(list[Any]):
    """A user's own kind of list."""

    def __len__(self) -> int:
        raise AssertionError("len was called")


def holding(**attributes: Any) -> Any:
    trap = Trap()
    for name, value in attributes.items():
        setattr(trap, name, value)
    return trap


BIG, BIGGER = [0] * 20, [0] * 30


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: holding(samples=BIG), ("dataset.samples", "list", 20)),
        (lambda: holding(slot=BIG), ("dataset.slot", "list", 20)),
        (lambda: holding(a=BIG, b=tuple(BIGGER)), ("dataset.b", "tuple", 30)),
        (lambda: holding(a=BIGGER, b=BIG), ("dataset.a", "list", 30)),
        (lambda: holding(a=dict(enumerate(BIG))), ("dataset.a", "dict", 20)),
        (lambda: holding(d={"train": BIG}), ("dataset.d['train']", "list", 20)),
        (lambda: holding(d={"t": [BIG]}), ("dataset.d['t'][0]", "list", 20)),
        (lambda: holding(d=holding(d=[holding(s=BIG)])), ("dataset.d.d[0].s", "list", 20)),
        (lambda: holding(a=holding(a=holding(a=holding(a=BIG)))), None),
        (lambda: holding(a=[0] * 10, b=range(100), c=np.zeros(100), d=Odd(BIG), e="x" * 100), None),
        (lambda: holding(a=SharedList(BIG)), None),
        (lambda: BIG, ("dataset", "list", 20)),
        (lambda: Trap, None),
        (lambda: 7, None),
    ],
)
def test_the_largest_container_is_found_without_running_code(
    make: Callable[[], Any], wanted: tuple[str, str, int] | None
) -> None:
    dataset = make()
    assert largest_container(dataset, limit=19) == wanted
    assert largest_container(dataset, limit=30) is None


def test_cycles_and_wide_things_are_no_trouble() -> None:
    loop = holding(samples=BIG)
    loop.self, loop.lists = loop, [loop]
    loop.lists.append(loop.lists)
    assert largest_container(loop, limit=10) == ("dataset.samples", "list", 20)
    wide = holding(rows=[[] for _ in range(2000)])
    wide.rows[1999] = BIGGER  # more entries than are looked at
    assert largest_container(wide, limit=10) == ("dataset.rows", "list", 2000)


def test_the_hint_comes_once_and_points_at_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "_hinted", False)
    hint_at_large_container(holding(a=BIG))  # small: nothing is said, and the hint is still to come
    dataset = SimpleNamespace(samples=[None] * 1_200_000)
    with pytest.warns(UserWarning, match="a list of") as caught:
        hint_at_large_container(dataset)
    assert str(caught[0].message) == (
        "dataset.samples is a list of 1,200,000 entries; each worker process will copy it piece by "
        "piece (counting references writes to it). hybridloader.SharedList(...) keeps one copy for all."
    )
    assert caught[0].filename == __file__
    hint_at_large_container(dataset)  # warnings are errors


def test_the_hint_for_a_dict_names_the_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "_hinted", False)
    dataset = SimpleNamespace(labels=dict.fromkeys(range(1_000_001)))
    with pytest.warns(UserWarning, match=r"dataset.labels is a dict of 1,000,001.*\.SharedDict\("):
        hint_at_large_container(dataset)
