"""Claims of docs/security.md, one by one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from support import bare_platform
from support.failing_datasets import Samples
from support.platforms import posix
from support.scripts import Kept, drain

from hybridloader import DataLoader, Pipeline
from hybridloader.errors import CacheError

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(params=["sockets", "portable"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    name: str = request.param
    without = bare_platform.lacking("without sockets", tmp_path)
    with without if name == "portable" else contextlib.nullcontext():
        yield name


def inherited() -> list[str]:
    """Descriptors of a program that this process starts, besides its standard streams."""
    code = (
        "import json, os\n"
        "found = []\n"
        "for fd in os.listdir('/proc/self/fd'):\n"
        "    try:\n"
        "        found.append(fd + ' ' + os.readlink('/proc/self/fd/' + fd))\n"
        "    except FileNotFoundError:\n"  # that of the listing itself
        "        pass\n"
        "print(json.dumps(sorted(line for line in found if int(line.split()[0]) > 2)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], close_fds=False, capture_output=True, check=True
    )
    found: list[str] = json.loads(done.stdout)
    return found


def as_they_are(batch: list[Any]) -> Any:
    return torch.stack([tensor for tensor, _ in batch]), [seen for _, seen in batch]


# -- connections -----------------------------------------------------------------------------------


def sockets() -> set[str]:
    """Addresses of all sockets that have one, of this process and its children."""
    found = set()
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has just ended
            for connection in process.net_connections("all"):
                if connection.status == "LISTEN" or connection.laddr:
                    found.add(str(connection.laddr))
    return found


def named() -> set[str]:
    """Memory that this process and its children have mapped with a name, now or before, in /dev/shm."""
    maps = ""
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(OSError):  # it has just ended
            maps += Path(f"/proc/{process.pid}/maps").read_text()
    return {name for name in re.findall(r"/dev/shm/(\S+)", maps) if not name.startswith("sem.")}


@posix
@linux
@pytest.mark.parametrize(
    ("backend", "transport"),
    [
        ("fork", "sockets"),
        ("threads", "sockets"),
        ("shared-memory", "portable"),
        pytest.param("spawn", "sockets", marks=pytest.mark.full),
        pytest.param("spawn", "portable", marks=pytest.mark.full),
    ],
    indirect=["transport"],
)
def test_nobody_listens_memory_has_no_name_and_programs_of_a_dataset_inherit_nothing(
    backend: str, transport: str
) -> None:
    before, shared, programs = sockets(), named(), set(inherited())

    def of_ours(seen: list[str]) -> set[str]:
        # loky lets three pipes be inherited: two to resource trackers, and one that nobody writes to.
        lokys = {one for one in seen if backend == "spawn" and " pipe:" in one}
        return set(seen) - programs - lokys

    loader: Any = DataLoader(
        # These go through slots, with a look at the worker from within.
        Samples(lambda index: (torch.full((300_000,), index), inherited())),
        2,
        num_workers=1 if backend == "spawn" else 2,  # a fresh one takes 2 s to import torch
        backend=backend,
        collate_fn=as_they_are,
    )
    with iter(loader) as iterator:
        for number, (tensor, seen) in enumerate(iterator):
            assert tensor[0, 0] == 2 * number
            assert sockets() <= before
            assert (named() <= shared) is (transport == "sockets")  # else such a name is seen
            assert not [of_ours(one) for one in seen if of_ours(one)]
            assert not of_ours(inherited())


@posix
@linux
def test_what_is_kept_to_be_sent_on_is_not_inherited_either() -> None:
    before = set(inherited())
    pipe = (
        Pipeline.from_dataset(range(6))
        .map(lambda i: torch.full((300_000,), i), backend="fork", num_workers=1, name="make")
        .batch(2)
        .map(lambda batch: (batch, inherited()), backend="fork", num_workers=1, name="look")
    )
    with pipe.run() as run:
        for _, seen in run:
            assert set(seen) <= before
            assert set(inherited()) <= before


# -- the files of caches ---------------------------------------------------------------------------


@pytest.fixture
def _any_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


ITEMS = [np.arange(30_000), "two"]


def write(file: Path) -> None:
    drain(Kept(file).begin(*ITEMS))


def begin(file: Path) -> Any:
    return Kept(file).begin(*ITEMS)


@posix
@pytest.mark.usefixtures("_any_umask")
def test_a_cache_is_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    found = begin(tmp_path / "cache")
    next(found)
    (partial,) = tmp_path.iterdir()
    assert stat.S_IMODE(partial.stat().st_mode) == 0o600  # while it is written, too
    drain(found)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o600


@posix
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o777])
def test_a_cache_that_others_may_write_to_is_not_read(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "cache"
    write(file)
    file.chmod(mode)
    with pytest.raises(CacheError, match=rf"others may write to it \(mode {mode:04o}\).*chmod 600"):
        begin(file)
    file.chmod(0o644)  # reading is another matter
    assert len(drain(begin(file))) == 2


def test_a_cache_of_somebody_else_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cache"
    write(file)
    if os.geteuid() == 0:
        os.chown(file, 4711, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4712)
    with pytest.raises(CacheError, match=r"belongs to user \d+, and this process is of user \d+"):
        begin(file)
    assert file.exists()


@posix
def test_where_files_are_given_to_others_none_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.mkstemp

    def given_to_others(*where: Any) -> tuple[int, str]:
        fd, name = make(*where)
        if os.geteuid() == 0:
            os.fchown(fd, 65534, -1)
        return fd, name

    monkeypatch.setattr(tempfile, "mkstemp", given_to_others)
    if os.geteuid() != 0:
        monkeypatch.setattr(os, "geteuid", lambda: 4712)
    with pytest.warns(UserWarning, match=r"could not be read again: it belongs to user \d+"):
        assert len(drain(begin(tmp_path / "cache"))) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_link_at_the_path_itself_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
    write(tmp_path / "cache")
    assert not (tmp_path / "cache").is_symlink()
    assert not (tmp_path / "elsewhere").exists()


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # `open` would wait for a writer for ever
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(CacheError, match="is no file; give another path"):
            begin(path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="folder"):
        begin(tmp_path / "folder")
