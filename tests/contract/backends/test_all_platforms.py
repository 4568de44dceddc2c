"""Each backend beside torch's loader, with its deaths, timeouts and ends, on every platform."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from support.dying_dataset import LARGE, Dying
from support.platforms import DEADLINE, FORK, PACKAGE
from torch.utils.data import Dataset, IterableDataset

from hybridloader import DataLoader, Pipeline, WorkerDied
from hybridloader.errors import BackendUnavailable, TaskTimeout

shown_by_forks = pytest.mark.full if FORK else ()
"""Of tests that other files make with forked workers, which start faster."""


class Samples(Dataset[Any]):
    """Tensors, arrays and objects; the large ones go through shared memory."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(3)
        return {
            "torch": (torch.full((LARGE,), float(index)), noise),
            "numpy": [np.full((LARGE,), index, np.int16), noise.numpy()],
            "objects": (f"sample {index}", {"label": index, "noise": float(noise[0])}),
        }


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info: Any = torch.utils.data.get_worker_info()
        return (Samples()[index] for index in range(info.id, 9, info.num_workers))


def flat(value: Any) -> Any:
    """Return nested lists and plain values, which compare by ``==``; a digest of each tensor."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.shape, zlib.crc32(value.contiguous().numpy())]
    if isinstance(value, dict):
        return {name: flat(part) for name, part in value.items()}
    return [flat(part) for part in value] if isinstance(value, (list, tuple)) else value


def make(cls: Any, dataset: Any, **options: Any) -> Any:
    shuffle = not isinstance(dataset, IterableDataset)
    generator = torch.Generator().manual_seed(3)
    return cls(dataset, 2, shuffle=shuffle, num_workers=2, generator=generator, **options)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("dataset", "backends"),
    [
        (Samples(), ["inline", "threads", "spawn", "shared-memory", None]),
        pytest.param(Stream(), ["threads", "spawn"], marks=shown_by_forks),
    ],
    ids=["map", "iterable"],
)
def test_batches_are_those_of_torch(dataset: Any, backends: list[str | None]) -> None:
    expected = flat(list(make(torch.utils.data.DataLoader, dataset)))
    for backend in backends:
        loader = make(DataLoader, dataset, backend=backend, seeding="worker")
        assert flat(list(loader)) == expected, backend


@pytest.mark.parametrize(
    "backend", ["threads", pytest.param("spawn", marks=shown_by_forks), "shared-memory"]
)
def test_a_pipeline_mixes_backends_and_takes_functions_made_on_the_spot(backend: str) -> None:
    offset = 10
    pipe = Pipeline.from_iterable(range(12)).map(
        lambda index: index + offset, backend="threads", num_workers=2
    )
    pipe = pipe.map(lambda value: np.full(LARGE, value), backend=backend, num_workers=2).batch(4)
    with pipe.run() as run:
        assert [batch[:, 0].tolist() for batch in run] == [
            [*range(10, 14)],
            [*range(14, 18)],
            [*range(18, 22)],
        ]


KILLED = "killed by signal SIGKILL" if FORK else "killed by signal SIGTERM|exited with code"
CRASHED = "killed by signal SIGSEGV" if FORK else r"exited with code 3221225477 \(0xc0000005\)"
AT = r"dying_dataset\.py\", line [0-9]+ in __getitem__"


HANGS = f"(?s)has been at 3 for.*The thread that does the tasks.*{AT}"


@pytest.mark.parametrize(
    ("backend", "how", "error", "words"),
    [
        pytest.param("spawn", "exit", WorkerDied, "exited with code 3", marks=shown_by_forks),
        pytest.param("shared-memory", "kill", WorkerDied, KILLED, marks=shown_by_forks),
        ("spawn", "crash", WorkerDied, f"(?s){CRASHED}.*The thread that crashed.*{AT}"),
        pytest.param("shared-memory", "hang", TaskTimeout, HANGS, marks=shown_by_forks),
    ],
)
def test_a_worker_that_ends_or_hangs_is_named_or_restarted(
    backend: str, how: str, error: type[Exception], words: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"num_workers": 2, "backend": backend}
    options["task_timeout"] = 3.0 if how == "hang" else 0
    with pytest.raises(error, match=words):
        list(DataLoader(Dying(tmp_path / "first", how), None, **options))  # type: ignore[arg-type]
    loader = DataLoader(Dying(tmp_path / "second", how), None, on_worker_death="restart", **options)
    assert [int(sample[0]) for sample in loader] == [*range(8)]


@pytest.mark.skipif(FORK, reason="this platform forks")
def test_where_nothing_forks_the_error_says_what_to_use() -> None:
    with pytest.raises(BackendUnavailable, match="'spawn', 'shared-memory' or 'threads'"):
        iter(DataLoader(range(3), num_workers=1, backend="fork"))  # type: ignore[arg-type]


SCRIPT = """
import os, sys, time
import numpy as np
from hybridloader import DataLoader

class Local:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 1 and sys.argv[1] == "busy":
            time.sleep(600)
        return np.full((50_000,), index)

iterator = iter(DataLoader(Local(), None, num_workers=2, backend="spawn"))
print(int(next(iterator)[0]), *(worker.pid for worker in iterator._workers), flush=True)
if sys.argv[2] == "exit":
    os._exit(1)
time.sleep(600)
"""
"""It has neither a ``__main__`` guard nor an importable dataset."""


@pytest.mark.parametrize(
    ("end", "workers"),
    [
        ("kill", "busy"),
        pytest.param("exit", "idle", marks=shown_by_forks),
    ],
)
def test_no_worker_outlives_its_parent(workers: str, end: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([PACKAGE, *sys.path])
    parent = subprocess.Popen(
        [sys.executable, str(script), workers, end],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert parent.stdout is not None
    first, *pids = map(int, parent.stdout.readline().split())
    assert first == 0
    assert len(pids) == 2
    children = []
    for pid in pids:
        try:
            children.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    if end == "kill":
        parent.kill()
    parent.communicate(timeout=DEADLINE)
    _, alive = psutil.wait_procs(children, DEADLINE)
    assert not alive


INTERRUPTED = """
import sys, time
from hybridloader import DataLoader

class Stuck:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        time.sleep(600 if index > 1 else 0)
        return index

iterator = iter(DataLoader(Stuck(), None, num_workers=2, backend=sys.argv[1]))
try:
    print(next(iterator), next(iterator), flush=True)
    next(iterator)
except KeyboardInterrupt:
    iterator.close()
    print("closed", flush=True)
"""

TERMINAL = """
import os, signal, subprocess, sys
import psutil

signal.signal(signal.SIGINT, lambda *_: None)
if os.name == "nt":
    import ctypes
    kernel = ctypes.windll.kernel32
    kernel.FreeConsole()
    kernel.AllocConsole()
program = subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=subprocess.PIPE, text=True)
program.stdout.readline()
workers = psutil.Process(program.pid).children(recursive=True)
if os.name == "nt":
    kernel.GenerateConsoleCtrlEvent(signal.CTRL_C_EVENT, 0)
else:
    os.killpg(0, signal.SIGINT)
print(*program.communicate(), program.returncode, psutil.wait_procs(workers, 20)[1])
"""
"""Ctrl-C in a terminal or console, whose processes all get it: the program and its workers."""


@pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=shown_by_forks) for name in ("threads", "spawn")],
)
def test_ctrl_c_interrupts_the_program_alone_and_leaves_no_worker(
    backend: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(INTERRUPTED)
    path = os.pathsep.join([PACKAGE, *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", TERMINAL, str(script), backend],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE * 5,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    assert done.stdout.split() == ["closed", "None", "0", "[]"]
