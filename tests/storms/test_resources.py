"""Resources that loaders take and give back: memory, threads, descriptors, segments; and limits.

Nothing may grow with epochs or with loaders. Where a limit is reached, what can be had without it is
had, and what can't is the error of the one sample that wanted it.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
from support.failing_datasets import Samples
from support.platforms import PACKAGE, posix

from hybridloader import DataLoader, Pipeline

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

BATCH = 1 << 20
"""Bytes of a batch here: more than a slot needs to be worth while."""


ROWS: Any = Samples(lambda index: np.full(BATCH // 2, index % 251, np.uint8))
"""Eight samples, of half a batch each."""


# -- no growth -------------------------------------------------------------------------------------


class Taken(NamedTuple):
    """Resources that this process and its workers have now."""

    memory: int  # bytes, resident
    threads: int
    descriptors: int
    children: int
    segments: frozenset[str]


def taken() -> Taken:
    gc.collect()
    me = psutil.Process()
    family = [me, *me.children(recursive=True)]
    pids = {process.pid for process in family}
    shared = [name for name in os.listdir("/dev/shm") if name.startswith("hl-")]
    return Taken(
        sum(process.memory_info().rss for process in family),
        threading.active_count(),
        sum(process.num_fds() for process in family),
        len(family),
        frozenset(name for name in shared if int(name.split("-")[1]) in pids),
    )


def epochs_of_a_loader(backend: str) -> Iterator[Any]:
    loader = DataLoader(ROWS, batch_size=2, num_workers=2, backend=backend, persistent_workers=True)
    while True:
        yield [int(batch[1][0]) for batch in loader]


def epochs_of_a_pipeline(backend: str) -> Iterator[Any]:
    where: dict[str, Any] = {"backend": backend, "num_workers": 2}
    pipe = Pipeline.from_dataset(ROWS, **where).map(np.copy, fuse=False, **where)
    with pipe.batch(2, collate_fn=np.stack).prefetch(2).epochs() as epochs:
        for epoch in epochs:
            yield [int(batch[1][0]) for batch in epoch]


@posix
@linux
@pytest.mark.parametrize(
    ("epochs", "backend"),
    [
        pytest.param(epochs_of_a_loader, "inline", marks=pytest.mark.full),
        (epochs_of_a_loader, "threads"),
        (epochs_of_a_loader, "fork"),
        (epochs_of_a_pipeline, "fork"),
    ],
)
def test_fifty_epochs_of_persistent_workers_take_no_more_than_the_first(
    epochs: Any, backend: str
) -> None:
    running = epochs(backend)
    for _ in range(10):  # slots and arenas of threads are made as they are needed
        assert next(running) == [1, 3, 5, 7]
    states = [taken()]
    # One batch that is kept of every epoch would be 50 MB. Allocators come and go by some, also in what
    # other tests have left here, so of three rounds one must show no growth.
    for _ in range(3):
        for _ in range(50):
            assert next(running) == [1, 3, 5, 7]
        states.append(taken())
        if states[-1].memory - states[-2].memory < 16 * BATCH:
            break
    running.close()
    assert states[-1].memory - states[-2].memory < 16 * BATCH
    # One more or less may be on its way; one that is left by every epoch would be 50.
    assert states[-1].descriptors <= states[0].descriptors + 16
    assert states[-1]._replace(memory=0, descriptors=0) == states[0]._replace(
        memory=0, descriptors=0
    )


# -- where something is short ----------------------------------------------------------------------

SCRIPT = """
import os
import numpy as np
from hybridloader import DataLoader

class Rows:
    def __len__(self):
        return 600

    def __getitem__(self, index):
        return np.full(150_000, index % 251, np.uint8)

for backend in ("threads", "fork"):
    loader = DataLoader(Rows(), 4, num_workers=2, backend=backend)
    assert [int(batch[1][0]) for batch in loader] == [(4 * k + 1) % 251 for k in range(150)]
    print(backend, os.listdir("/dev/shm"))
"""


def in_a_namespace(mount: str) -> tuple[str, ...]:
    """The words before a command that is to see another /dev/shm."""
    prefix = ("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh")
    try:
        done = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if done.returncode != 0:
        pytest.skip("may not mount in a namespace of its own")
    return prefix


FULL = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
NOT_WRITABLE = "mount -t tmpfs -o ro,size=4k tmpfs /dev/shm"


@linux
@needs_fork
@pytest.mark.parametrize(
    "mount",
    [
        pytest.param(FULL, id="full"),
        pytest.param(NOT_WRITABLE, id="not writable", marks=pytest.mark.full),
    ],
)
def test_without_room_in_dev_shm_batches_come_all_the_same(mount: str) -> None:
    command = [*in_a_namespace(mount), sys.executable, "-W", "error", "-c", SCRIPT]
    environment = {**os.environ, "PYTHONPATH": PACKAGE}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "threads []\nfork []\n"
