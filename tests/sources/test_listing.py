"""Lists of files: names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridloader.sources import Files


@pytest.mark.parametrize("name", ["::x.txt", "a::b.txt", "zip::x.txt", "s3::a::x.txt"])
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
