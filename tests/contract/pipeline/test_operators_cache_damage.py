"""Files of caches that are not as they should be: what comes is what was written, or an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.comparison import same
from support.platforms import posix
from support.scripts import Kept, drain

from hybridloader.errors import CacheError

in_a_folder = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache"


ITEMS = [1, "two", np.arange(9_000), {"four": torch.ones(3)}]


def written(file: Path, fingerprint: str = "of this") -> bytes:
    drain(Kept(file, fingerprint).begin(*ITEMS))
    return file.read_bytes()


def test_a_file_of_another_format_is_refused(file: Path) -> None:
    whole = bytearray(written(file))
    whole[8] ^= 1
    file.write_bytes(whole)
    with pytest.raises(CacheError, match="of format 2, and this release reads format 3; delete it"):
        Kept(file, "of this").begin()


def test_a_foreign_file_is_refused_and_left_as_it_is(file: Path) -> None:
    for content in (b"", b"x", b"not a cache " * 100):
        file.write_bytes(content)
        with pytest.raises(CacheError, match="is not a cache file; pass another path"):
            Kept(file).begin()
        assert file.read_bytes() == content


@in_a_folder
@given(st.data())
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    file = tmp_path / "cache"
    file.unlink(missing_ok=True)
    whole = written(file)
    file.write_bytes(whole[: data.draw(st.integers(8, len(whole) - 1))])
    with pytest.raises(CacheError, match=r"cache' is damaged: it is cut off, .*delete it"):
        Kept(file, "of this").begin()


@posix
@in_a_folder
@given(st.data())
def test_damage_is_found_wherever_it_is(tmp_path: Path, data: st.DataObject) -> None:
    """An item is read as it was written, or raises an error; never anything else."""
    file = tmp_path / "cache"
    file.unlink(missing_ok=True)
    whole = bytearray(written(file))
    # As often in the small parts as in the large array.
    at = data.draw(st.one_of(st.integers(0, 1000), st.integers(0, len(whole) - 1)))
    at = data.draw(st.sampled_from([at, len(whole) - 1 - at]))
    whole[at] ^= data.draw(st.integers(1, 255))
    file.write_bytes(whole)
    try:
        found = drain(Kept(file, "of this").begin())
    except CacheError:
        return
    assert len(found) == len(ITEMS)
    for number, (item, expected) in enumerate(zip(found, ITEMS, strict=True)):
        if isinstance(item, CacheError):
            assert f"damaged: record {number} of 4 is not as it was written; delete" in str(item)
        else:
            same(item, expected)


def test_digests_are_checked_before_anything_is_unpickled(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bytearray(written(file))
    whole[whole.index(b"two")] ^= 1
    file.write_bytes(whole)
    unpickled = []
    monkeypatch.setattr(
        "hybridloader.pipeline.cache.unpack", lambda *parts: unpickled.append(parts)
    )
    run = Kept(file).again()
    next(run)
    unpickled.clear()
    with pytest.raises(CacheError):
        next(run)
    assert not unpickled
