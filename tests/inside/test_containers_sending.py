"""SharedList and SharedDict are sent to other processes by reference, of whatever kind these are."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support.containers import (
    READ,
    BufferGone,
    forked,
    linux,
    output,
    owner,
    read_pickle,
    shared_buffer,
)

from hybridloader.records import SharedDict, SharedList


def test_a_pickle_of_a_million_is_tiny_and_a_copy_the_thing_itself(shared_kind: str) -> None:
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
    for thing in (shared, mapping):
        assert copy.copy(thing) is thing
        assert copy.deepcopy({"in": thing})["in"] is thing


def test_another_process_reads_it_whatever_its_hash_seed(shared_kind: str) -> None:
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
    for seed in ("1", "2"):
        assert output(code, pickle.dumps(things), PYTHONHASHSEED=seed) == (
            "['c', 'b\\xe9', 'a'] {'x': 1.5, ('y', 2): b'raw', 1208925819614629174706176: None} "
            "1.5 b'raw' None False"
        )
    assert list(things[0]) == ["c", "b\u00e9", "a"]


def test_reading_imports_neither_torch_nor_numpy(shared_kind: str) -> None:
    things = SharedList(["a"]), SharedDict({"a": (1, 2)}), SharedList([1]), SharedList([0.5])
    heavy = "print(sorted({'torch', 'numpy', 'loky', 'cloudpickle'} & set(sys.modules)))"
    read = "import sys\nl, d, i, f = shared; l[0], d['a'], 5 in d, list(i), f[0], d == {}\n"
    assert output(READ + read + heavy, pickle.dumps(things)) == "[]"
    make = "import sys\nfrom hybridloader.records import SharedDict, SharedList\n"
    make += "SharedList('ab'); SharedDict({1: 2})\n"
    assert output(make + heavy) == "[]"


def test_a_forked_child_reads_and_pickles_it_and_takes_nothing_along(shared_kind: str) -> None:
    containers: list[Any] = [SharedList(["a", "b", "c"]), SharedDict({"a": 1})]

    def in_child() -> Any:
        found = (
            list(containers[0]),
            dict(containers[1]),
            pickle.dumps(containers[0]),
            pickle.dumps(containers[0][1:]),
        )
        fresh = SharedList([1, 2])
        assert pickle.loads(pickle.dumps(fresh)) == [1, 2]
        containers.clear()
        del fresh
        gc.collect()
        return found

    elements, pairs, whole, part = forked(in_child)
    assert (elements, pairs) == (["a", "b", "c"], {"a": 1})
    assert pickle.loads(whole)._buffer is containers[0]._buffer
    # The name or the descriptor is still there for a process that has not mapped it yet:
    assert output(READ + "print(list(shared))", part) == "['b', 'c']"
    assert output(READ + "print(list(shared))", pickle.dumps(containers[0])) == "['a', 'b', 'c']"


def test_a_reader_outlives_the_owner_and_what_comes_later_is_told(shared_kind: str) -> None:
    with owner(shared_kind) as process:
        assert process.stdout is not None
        received = pickle.loads(pickled := read_pickle(process.stdout))
        late = pickle.loads  # in this process it is known, so it can still be opened by its pickle
        assert late(pickled)._buffer is received._buffer
        process.communicate()
    assert list(received) == ["a", "b", "c"]
    again = pickle.dumps(received[::2])
    if shared_kind == "nameless":  # this process has it open, so others can get it here
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
