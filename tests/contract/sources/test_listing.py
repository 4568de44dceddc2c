"""Lists of files: asked of the store each time, and patterns that are written out."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec.spec import AbstractFileSystem
from support.archives import sample_members, tar_bytes
from support.http_store import HttpStore
from support.platforms import POSIX

from hybridloader.errors import SourceError
from hybridloader.sources import Files, Parquet, Tar


class ListedStore(AbstractFileSystem):  # type: ignore[misc]
    """Files by path, such as ``bucket/a.txt``; each thread has an instance, with listings of its own.

    As Azure's, a listing has checksums without quotation marks, and only `info` has them with these.
    """

    protocol = "listed"
    files: ClassVar[dict[str, bytes]] = {}
    requests: ClassVar[list[str]] = []
    """``list``, ``info`` or ``get``, and the path."""

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.requests.append(f"list {path}")
            self.dircache[path] = [*self._listed(path).values()]
        found = self.dircache[path]
        if not found:
            raise FileNotFoundError(path)
        return found if detail else [entry["name"] for entry in found]

    def _listed(self, path: str) -> dict[str, dict[str, Any]]:
        found = {}
        for name in self.files:
            if name.startswith(f"{path}/"):
                end = name.find("/", len(path) + 1)
                entry = self._entry(name, "") if end < 0 else _folder(name[:end])
                found[entry["name"]] = entry
        return found

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        found = self._ls_from_cache(path)
        if found is not None:
            return next((entry for entry in found if entry["name"] == path), _folder(path))
        self.requests.append(f"info {path}")
        if path in self.files:
            return self._entry(path, '"')
        if not self._listed(path):
            raise FileNotFoundError(path)
        return _folder(path)

    def _entry(self, path: str, quote: str) -> dict[str, Any]:
        data = self.files[path]
        mark = hashlib.sha256(data).hexdigest()
        return {"name": path, "size": len(data), "type": "file", "ETag": f"{quote}{mark}{quote}"}

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
        size = self.info(path)["size"]
        self.requests.append(f"get {path}")
        return io.BytesIO(self.files[path][:size])

    def invalidate_cache(self, path: str | None = None) -> None:
        if path is None:
            self.dircache.clear()
        else:  # neither the folders around it, as Azure's, nor those below it, as Amazon's
            self.dircache.pop(self._strip_protocol(path), None)


class SharedListedStore(ListedStore):
    """As the stores whose requests an event loop makes: all threads share an instance."""

    protocol = "shared-listed"
    async_impl = True

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        path = self._strip_protocol(path)
        self.requests.append(f"get {path}")
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path][start:end]


def _folder(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}


@pytest.fixture(params=[ListedStore, SharedListedStore])
def listed(request: Any) -> Iterator[Any]:
    """A store whose file system keeps its listings; another process fills `files`."""
    fsspec = pytest.importorskip("fsspec")
    store = request.param
    fsspec.register_implementation(store.protocol, store, clobber=True)
    yield store
    store.files.clear()
    store.requests.clear()
    store.clear_instance_cache()


def requests(store: Any) -> list[str]:
    """Return the requests since the last call."""
    made = [*store.requests]
    store.requests.clear()
    return made


def parquet_bytes(first: int) -> bytes:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    packed = io.BytesIO()
    pq.write_table(pa.table({"x": range(first, first + 4)}), packed, row_group_size=2)
    return packed.getvalue()


def zip_bytes(texts: list[str]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for number, text in enumerate(texts):
            archive.writestr(f"{number}.txt", text)
    return packed.getvalue()


def test_a_source_made_again_asks_the_store_again(listed: Any) -> None:
    place = f"{listed.protocol}://b"
    for pattern in ("*/*.txt", "**", ""):
        listed.files.clear()
        listed.files.update({"b/c/1.txt": b"one", "b/d/2.txt": b"two"})
        assert [*Files(f"{place}/{pattern}")] == [b"one", b"two"]
        listed.files.update({"b/c/1.txt": b"longer", "b/c/3.txt": b"three"})
        del listed.files["b/d/2.txt"]
        assert [*Files(f"{place}/{pattern}")] == [b"longer", b"three"]
    listed.files.clear()
    first, second = parquet_bytes(0), parquet_bytes(100)
    assert len(first) == len(second)
    for name in ("a", "*"):
        listed.files["b/a.tar"] = tar_bytes(sample_members(0, 3))
        listed.files["b/a.zip"] = zip_bytes(["one"])
        listed.files["b/a.parquet"] = first
        Files(f"{place}/*")  # keeps the listing of the folder
        rows = Parquet(f"{place}/{name}.parquet")
        assert len(Tar(f"{place}/{name}.tar")) == 3
        chain = f"zip://*.txt::{place}/a.zip"
        assert [*Files(chain, decode=bytes.decode)] == ["one"]
        listed.files["b/a.tar"] = tar_bytes(sample_members(0, 40))
        listed.files["b/a.zip"] = zip_bytes(["two", "three"])
        listed.files["b/a.parquet"] = second
        assert len(Tar(f"{place}/{name}.tar")) == 40
        assert [*Files(chain, decode=bytes.decode)] == ["two", "three"]
        with pytest.raises(SourceError, match=r"a\.parquet has changed since it was indexed"):
            rows[0]
        again = Parquet(f"{place}/{name}.parquet")
        assert [row["x"] for row in again] == [100, 101, 102, 103]


def test_a_listing_is_a_request_for_a_folder_and_not_for_each_file(listed: Any) -> None:
    listed.files.update({f"b/{number:02d}.txt": f"{number}".encode() for number in range(50)})
    files = Files([f"{listed.protocol}://b/*.txt", f"{listed.protocol}://b/4*.txt"])
    found = requests(listed)
    assert found.count("list b") == 1
    assert len(found) < 5  # fsspec also asks for the folder
    assert [int(one) for one in files] == [*range(50)]
    found = [one for one in requests(listed) if not one.startswith("get ")]
    assert found in ([], ["list b"])  # an instance of this thread alone lists to know the sizes


@pytest.mark.parametrize("listed", [SharedListedStore], indirect=True)
def test_a_table_asks_for_each_file_as_it_is_first_opened_and_never_before(listed: Any) -> None:
    listed.files.update({f"b/{number:02d}.parquet": parquet_bytes(number) for number in range(20)})
    rows = Parquet("shared-listed://b/*.parquet")
    found = [one for one in requests(listed) if not one.startswith("get ")]
    assert found.count("list b") == 1
    assert len(found) < 5
    for _ in range(2):
        assert [row["x"] for row in rows] == [n + row for n in range(20) for row in range(4)]
    found = [one for one in requests(listed) if not one.startswith("get ")]
    assert found == [f"info {name}" for name in listed.files]


def test_a_store_that_tells_no_sizes_serves_archives_and_no_tables(
    listed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = listed._entry
    monkeypatch.setattr(listed, "_entry", lambda *given: {**entry(*given), "size": None})
    listed.files["b/a.tar"] = tar_bytes(sample_members(0, 3))
    assert len(Tar(f"{listed.protocol}://b/a.tar")) == 3
    listed.files["b/a.parquet"] = parquet_bytes(0)
    with pytest.raises(SourceError, match=r"a\.parquet can't be read by ranges, as its store rep"):
        Parquet(f"{listed.protocol}://b/a.parquet")


# Patterns.


WRITTEN_OUT = {  # as bash writes them out
    "{3..1}": "3 2 1",
    "{0..3}": "0 1 2 3",
    "{5..5}": "5",
    "{10..9}": "10 9",
    "{008..011}": "008 009 010 011",
    "{008..003}": "008 007 006 005 004 003",
    "{8..010}": "008 009 010",
    "{1..2}-{4..3}": "1-4 1-3 2-4 2-3",
    "{{1..2}}": "{1} {2}",
    "{x}": "{x}",
    "{}": "{}",
}
REFUSED = (
    *("{a,b}", "{a..c}", "{1..9..2}", "{1..a}", "{Z..b}", "{1..}", "{1..3..x}"),
    *("{{1..2}..3}", "{{1..2},5}", "{,{1..2}}"),
)


def test_ranges_are_written_out_as_bash_does_and_other_braces_refused(store: HttpStore) -> None:
    place = f"{store.url}/d"
    for pattern, names in WRITTEN_OUT.items():
        urls = [f"{place}/{name}.txt" for name in names.split(" ")]
        assert Files(f"{place}/{pattern}.txt").paths[:] == urls
        assert Files([f"{place}/{pattern}.txt", f"{place}/x"]).paths[:] == [*urls, f"{place}/x"]
    for pattern in REFUSED:
        with pytest.raises(ValueError, match="are not expanded") as told:
            Files([f"{place}/x.txt", f"{place}/{pattern}.txt"])
        assert f"{place}/{pattern}.txt" in str(told.value)
    assert not store.requests  # names that need no listing are not asked for


def test_a_brace_that_is_part_of_a_name_can_be_named(tmp_path: Path) -> None:
    for name in ("{a,b}.txt", "{1..2}.txt", "1.txt"):
        (tmp_path / name).write_text(name)
    url = f"{tmp_path}/[{{]*.txt"
    assert [*Files(url, decode=bytes.decode)] == ["{1..2}.txt", "{a,b}.txt"]
    assert [*Files(f"{tmp_path}/[{{]a,b}}.t*", decode=bytes.decode)] == ["{a,b}.txt"]


def test_a_pattern_without_files_among_others_is_told(tmp_path: Path, memory: Any) -> None:
    (tmp_path / "1.txt").write_text("one")
    memory.pipe("/data/1.txt", b"one")
    for place in (f"{tmp_path}", "memory://data"):
        for pattern in ("*.png", "{2..3}*", "none/"):
            with pytest.raises(FileNotFoundError, match=r"png|2\*|none"):
                Files([f"{place}/1.txt", f"{place}/{pattern}", f"{place}/*.txt"])


def test_a_local_file_is_read_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["{3..1}.txt", "{a,b}.txt"]
    if POSIX:  # Windows has no colons in names
        names += ["::x.txt", "a::b.txt", "zip::x.txt", "s3::a::x.txt"]
    for number, name in enumerate(names):
        folder = Path(f"in::side {number}" if POSIX else f"inside {number}")
        folder.mkdir()
        for place in (Path(), folder):
            (place / name).write_text(f"text of {place}")
        for url in (name, Path(name), tmp_path / name):
            files = Files(url, decode=bytes.decode)
            assert [*files] == ["text of ."]
            assert files.paths[:] == [f"{tmp_path.as_posix()}/{name}"]
        for url in (f"{folder}", f"{folder}/", f"{folder}/*.txt", tmp_path / folder):
            assert [*Files(url, decode=bytes.decode)] == [f"text of {folder}"]
        Path(name).unlink()
    for name in ("::y.txt", "zip::y.txt"):  # which is taken for no chain
        with pytest.raises(FileNotFoundError, match=name):
            Files(name)


@pytest.mark.parametrize("cache", ["simplecache", "filecache"])
def test_archives_are_read_by_a_chain_with_a_cache(
    store: HttpStore, cache: str, tmp_path: Path
) -> None:
    for number in range(2):
        store.files[f"/{number}.tar"] = tar_bytes(sample_members(number * 3, 3))
    options = {cache: {"cache_storage": str(tmp_path)}}
    tar = Tar(f"{cache}::{store.url}/{{0..1}}.tar", fields=("txt",), storage_options=options)
    assert tar.shard_names == [f"{store.url}/{number}.tar" for number in range(2)]
    store.requests.clear()
    assert [text for (text,) in tar] == [text for _, text in sample_members(0, 6)[::2]]
    assert cache != "simplecache" or not store.requests  # the others know of files by thread
    tar.close()
