"""Lists of files: names, and patterns that are written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridloader.sources import Files
from hybridloader.sources.listing import urls_of


@pytest.mark.parametrize(
    ("pattern", "names"),  # as bash writes them out
    [
        ("{3..1}", "3 2 1"),
        ("{0..3}", "0 1 2 3"),
        ("{5..5}", "5"),
        ("{10..9}", "10 9"),
        ("{1..10..2}", "1 3 5 7 9"),
        ("{1..10..-4}", "1 5 9"),
        ("{10..1..3}", "10 7 4 1"),
        ("{1..3..0}", "1 2 3"),
        ("{008..011}", "008 009 010 011"),
        ("{008..003}", "008 007 006 005 004 003"),
        ("{8..010}", "008 009 010"),
        ("{-1..1}", "-1 0 1"),
        ("{-01..1}", "-01 000 001"),
        ("{a..c}", "a b c"),
        ("{c..a}", "c b a"),
        ("{A..I..4}", "A E I"),
        ("{1..2}-{b..a}", "1-b 1-a 2-b 2-a"),
        ("{{1..2}}", "{1} {2}"),
        ("{x}", "{x}"),
        ("{}", "{}"),
    ],
)
@pytest.mark.parametrize("place", ["", "s3://bucket/"])
def test_ranges_are_written_out_as_bash_does(place: str, pattern: str, names: str) -> None:
    assert urls_of(f"{place}{pattern}.txt") == [f"{place}{name}.txt" for name in names.split(" ")]
    assert urls_of([f"{pattern}", "x"]) == [*names.split(" "), "x"]


@pytest.mark.parametrize(
    "pattern",
    ["{a,b}", "{1..a}", "{Z..b}", "{1..}", "{1..3..x}", "{{1..2}..3}", "{{1..2},5}", "{,{1..2}}"],
)
def test_braces_that_are_not_written_out_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="are not written out") as told:
        Files(["s3://bucket/x.txt", f"s3://bucket/{pattern}.txt"])
    assert f"s3://bucket/{pattern}.txt" in str(told.value)


def test_a_brace_that_is_part_of_a_name_can_be_named(tmp_path: Path) -> None:
    for name in ("{a,b}.txt", "{1..2}.txt", "1.txt"):
        (tmp_path / name).write_text(name)
    url = f"{tmp_path}/[{{]*.txt"
    assert [*Files(url, load="text")] == ["{1..2}.txt", "{a,b}.txt"]
    assert [*Files(f"{tmp_path}/[{{]a,b}}.t*", load="text")] == ["{a,b}.txt"]


def test_a_pattern_without_files_among_others_is_told(tmp_path: Path, memory: Any) -> None:
    (tmp_path / "1.txt").write_text("one")
    memory.pipe("/data/1.txt", b"one")
    for place in (f"{tmp_path}", "memory://data"):
        for pattern in ("*.png", "{2..3}*", "none/"):
            with pytest.raises(FileNotFoundError, match=r"png|2\*|none"):
                Files([f"{place}/1.txt", f"{place}/{pattern}", f"{place}/*.txt"])


@pytest.mark.parametrize(
    "name", ["::x.txt", "a::b.txt", "zip::x.txt", "s3::a::x.txt", "{3..1}.txt", "{a,b}.txt"]
)
def test_a_local_file_is_read_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("in::side")
    folder.mkdir()
    for place in (Path(), folder):
        (place / name).write_text(f"text of {place}")
        (place / "other.txt").write_text("another")
    for url in (name, Path(name), tmp_path / name):
        files = Files(url, load="text")
        assert [*files] == ["text of ."]
        assert files.paths[:] == [f"{tmp_path.as_posix()}/{name}"]
    for url in (f"{folder}", f"{folder}/", f"{folder}/*.txt", tmp_path / folder):
        assert sorted(Files(url, load="text")) == ["another", "text of in::side"]


def test_a_local_name_that_is_not_there_is_not_taken_for_a_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("x")
    for url in ("::x.txt", "zip::x.txt"):
        with pytest.raises(FileNotFoundError, match=url):
            Files(url)
