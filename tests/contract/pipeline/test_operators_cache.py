"""Caches: what a whole pass gave is given again; nothing that is not whole or not intact ever is."""

from __future__ import annotations

import errno
import gc
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.comparison import same
from support.failing_datasets import explode, text_of
from support.platforms import posix
from support.programs import output
from support.scripts import Kept, Oops, drain

from hybridloader.errors import ResultPicklingError

in_a_folder = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(params=["memory", "file"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    return Kept() if request.param == "memory" else Kept(tmp_path / "cache")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# -- both kinds --------------------------------------------------------------------------------------


def test_later_passes_give_what_the_first_gave_and_open_nothing(cache: Kept) -> None:
    assert drain(cache.begin(1, None, "a", (2, [3]))) == [1, None, "a", (2, [3])]
    for _ in range(2):
        assert drain(cache.again()) == [1, None, "a", (2, [3])]


def test_a_pass_that_was_broken_off_is_not_kept(cache: Kept, tmp_path: Path) -> None:
    for closed in (True, False):
        found = cache.begin(*range(3))
        assert [next(found) for _ in range(3)] == [0, 1, 2]
        if closed:
            found.close()
            found.close()
        del found
        gc.collect()
        assert os.listdir(tmp_path) == []
    assert drain(cache.begin("whole")) == ["whole"]
    assert drain(cache.again()) == ["whole"]


def test_a_pass_in_which_an_item_raised_is_not_kept(cache: Kept, tmp_path: Path) -> None:
    found = cache.begin(1, Oops(1), 2, Oops(2), 3)
    with pytest.warns(UserWarning, match=r"items raised errors \(2 here\) is not whole") as told:
        assert drain(found) == [1, Oops(1), 2, Oops(2), 3]
    assert len(told) == 1
    assert os.listdir(tmp_path) == []


def test_passes_at_the_same_time_do_not_disturb_each_other(cache: Kept) -> None:
    one, other = cache.begin(1, 2), cache.begin(3, 4)
    assert [next(one), next(other)] == [1, 3]
    assert drain(one) == [2]
    assert drain(cache.again()) == [1, 2]
    assert drain(other) == [4]
    assert drain(cache.again()) == ([1, 2] if cache.path is None else [3, 4])


# -- in memory ---------------------------------------------------------------------------------------


def test_memory_gives_the_same_objects_and_their_number() -> None:
    cache, item = Kept(), object()
    assert cache.pipe.length is None
    drain(cache.begin(item, 2))
    assert cache.pipe.length == 2
    assert drain(cache.again())[0] is item


# -- in a file ---------------------------------------------------------------------------------------

plain = st.one_of(
    st.integers(),
    st.none(),
    st.text(),
    st.builds(lambda n: bytes(n % 97 for _ in range(n)), st.integers(0, 200_000)),
    st.builds(lambda n: np.arange(n, dtype=np.float32), st.integers(0, 40_000)),
    st.builds(lambda n: torch.arange(n * 3).reshape(n, 3), st.integers(0, 9_000)),
    st.lists(st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), max_size=3)),
)


@in_a_folder
@given(st.lists(plain, max_size=6))
def test_what_is_read_is_what_was_written(tmp_path: Path, items: list[Any]) -> None:
    file = tmp_path / "cache"
    file.unlink(missing_ok=True)
    same(drain(Kept(file).begin(*items)), items)
    same(drain(Kept(file).again()), items)
    assert os.listdir(tmp_path) == ["cache"]


def test_arrays_can_be_written_to_and_the_file_stays_as_it_is(file: Path) -> None:
    small, large = np.arange(3), np.arange(100_000.0)
    drain(Kept(file).begin(small, large, torch.arange(50_000)))
    before = file.read_bytes()
    found = drain(Kept(file).again())
    assert found[1].ctypes.data % 64 == 0
    for item in found:
        item[0] = 77
    assert [item[0] for item in found] == [77, 77, 77]
    assert file.read_bytes() == before
    assert [item[0] for item in drain(Kept(file).again())] == [0, 0, 0]


@posix
def test_arrays_outlive_the_pass_and_the_file_which_only_this_user_may_read(file: Path) -> None:
    drain(Kept(file).begin(np.arange(100_000)))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = Kept(file).again()
    item = next(found)
    found.close()
    file.unlink()
    assert item.sum() == 100_000 * 99_999 // 2


def test_a_path_may_be_relative_and_a_text_but_its_folder_must_be_there(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    drain(Kept("cache").begin(1))
    assert drain(Kept(str(file)).again()) == [1]
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere.* make it first"):
        Kept(file.parent / "nowhere" / "cache").begin(1)


class Unloadable:
    def __reduce__(self) -> Any:
        return explode, ("an item",)


def test_an_item_that_can_not_be_loaded_is_an_error_in_its_place_that_names_the_file(
    file: Path,
) -> None:
    drain(Kept(file).begin(1, Unloadable(), 3))
    found = Kept(file).again()
    assert next(found) == 1
    with pytest.raises(ArithmeticError, match="an item that can't be loaded") as raised:
        next(found)
    assert f"while record 1 of the cache file {str(file)!r} was loaded" in text_of(raised.value)
    assert next(found) == 3
    found.close()


def test_an_item_that_cannot_be_pickled_is_an_error_and_nothing_is_kept(file: Path) -> None:
    found = Kept(file).begin(1, threading.Lock(), 2)
    with pytest.warns(UserWarning, match=r"\(1 here\)"):
        one, error, two = drain(found)
    assert (one, two) == (1, 2)
    assert isinstance(error, ResultPicklingError)
    assert "cache file" in str(error)
    assert "lock" in str(error)
    assert os.listdir(file.parent) == []


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*arguments: Any, **more: Any) -> Any:
        raise error

    return fail


def close_and_fail(fd: int) -> None:
    real_close(fd)
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


real_close = os.close
FULL = failing(OSError(errno.ENOSPC, "No space left on device"))
LARGE = np.arange(100_000)


@pytest.mark.parametrize(
    ("name", "replacement", "items", "at"),
    [
        ("tempfile.mkstemp", failing(PermissionError("not here")), [1, 2], 0),
        ("_write", FULL, [LARGE, LARGE + 1, LARGE + 2], 1),
        ("_write", FULL, [1, 2], 1),  # what is small is written at the end
        ("os.replace", failing(PermissionError("in use")), [1, 2], 1),
        ("os.close", close_and_fail, [1, 2], 1),
    ],
)
def test_any_failure_to_write_is_told_once_and_costs_only_the_cache(
    file: Path, monkeypatch: pytest.MonkeyPatch, name: str, replacement: Any, items: Any, at: int
) -> None:
    def one_pass() -> list[Any]:
        begun = [] if at == 0 else [Kept(file).begin(*items)]
        first = [next(run) for run in begun]
        monkeypatch.setattr(f"hybridloader.pipeline.cache.{name}", replacement)
        return first + drain(begun[0] if begun else Kept(file).begin(*items))

    with pytest.warns(UserWarning, match="continues without a cache") as told:
        found = one_pass()
    monkeypatch.undo()
    same(found, items)
    assert len(told) == 1
    assert os.listdir(file.parent) == []


def test_writes_may_be_partial(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(
        "hybridloader.pipeline.cache.os.write",
        lambda fd, view: real(fd, view[:1000]),
    )
    item = np.arange(30_000)
    drain(Kept(file).begin(item, "b"))
    monkeypatch.undo()
    same(drain(Kept(file).again()), [item, "b"])


def test_an_interrupt_while_writing_leaves_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Kept(file).begin(LARGE, 2)
    monkeypatch.setattr("hybridloader.pipeline.cache._write", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        next(found)
    monkeypatch.undo()
    assert os.listdir(file.parent) == []


@posix
def test_neither_a_fork_nor_an_exit_writes_or_leaves_what_is_under_way(file: Path) -> None:
    code = f"""
import gc, os, sys
sys.path.insert(0, "tests")
from support.scripts import Kept, drain
found = Kept({str(file)!r}).begin(*range(1000))
print(next(found))
child = os.fork()
if not child:
    del found
    gc.collect()
    sys.exit()
os.waitpid(child, 0)
assert drain(found) == list(range(1, 1000))
found = Kept({str(file.parent / "other")!r}).begin(*range(1000))
next(found)
"""
    output("-c", code)
    assert drain(Kept(file).again()) == list(range(1000))
    assert os.listdir(file.parent) == ["cache"]
