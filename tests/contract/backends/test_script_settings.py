"""Without `backend=`, fresh workers have what the top of the script sets and registers, as torch's have.

`support.script_with_settings` asks the workers of both; torch's are right.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from support.failing_datasets import Samples, load
from support.platforms import FORK, REPOSITORY, needs_zygote
from support.programs import python
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from hybridloader import Pipeline, SharedMemory, Spawn

TESTS = REPOSITORY / "tests"
FILE = ("support/script_with_settings.py",)
MODULE = ("-m", "support.script_with_settings")


@pytest.mark.parametrize(
    ("program", "method", "keep", "tops"),
    [
        pytest.param(FILE, "fork", (), 1, marks=pytest.mark.full),
        # torch's workers run it. So does the process that forks ours; one that spawns has no such.
        pytest.param(FILE, "forkserver", (), 3, marks=needs_zygote),
        pytest.param(MODULE, "forkserver", (), 3, marks=[needs_zygote, pytest.mark.full]),
        # An open file is a reason not to fork: then the worker runs it, too.
        pytest.param(FILE, "forkserver", ("keep",), 4, marks=[needs_zygote, pytest.mark.full]),
        pytest.param(FILE, "spawn", (), 3, marks=pytest.mark.full if FORK else ()),
    ],
    ids=["fork", "forkserver", "forkserver of a module", "forkserver one by one", "spawn"],
)
def test_workers_have_the_settings_of_the_script_as_torchs_have(
    program: tuple[str, ...], method: str, keep: tuple[str, ...], tops: int, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    done = python(*program, method, log, *keep, cwd=TESTS)
    assert ("one by one" in done.stderr, done.returncode) == (bool(keep), 0), done.stderr
    torchs, ours = json.loads(done.stdout)
    assert ours == torchs
    assert (torchs["default dtype"], torchs["threads of torch"]) == ("torch.float64", 1)
    assert len(log.read_text().split()) == tops


UNGUARDED = """
    import sys, torch
    from hybridloader import DataLoader
    print("top", flush=True)
    for batch in DataLoader(range(4), num_workers=1, multiprocessing_context=sys.argv[1]):
        print(batch)
"""

BELOW = """
    import sys, torch
    from hybridloader import DataLoader
    print("top", flush=True)
    if __name__ == "__main__":
        class Below(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return index
        list(DataLoader(Below(), num_workers=1, multiprocessing_context=sys.argv[1]))
"""

EXITS = """
    import sys
    from hybridloader import DataLoader
    print("top", flush=True)
    if __name__ != "__main__":
        sys.exit("no licence")
    list(DataLoader(range(4), num_workers=1, multiprocessing_context=sys.argv[1]))
"""


@pytest.mark.parametrize(
    "method",
    [pytest.param("forkserver", marks=needs_zygote), pytest.param("spawn", marks=pytest.mark.full)],
)
@pytest.mark.parametrize(
    ("script", "words"),
    [
        (UNGUARDED, r"BackendUnavailable: .*Put the loop under `if __name__ == '__main__':`"),
        pytest.param(
            *(BELOW, r"WorkerPicklingError: .*Define it above that line.* or pass backend='spawn'"),
            marks=pytest.mark.full,
        ),
        pytest.param(EXITS, r"no licence", marks=pytest.mark.full),
    ],
    ids=["without a guard", "class below the guard", "exit"],
)
def test_a_script_that_can_not_run_again_gets_an_error_with_the_cure(
    script: str, words: str, method: str, tmp_path: Path
) -> None:
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script))
    done = python(file, method)
    assert (done.stdout.split(), done.returncode) == (["top", "top"], 1)
    last = done.stderr[done.stderr.rindex("hybridloader.errors.Worker") :]
    # multiprocessing's own processes print the error: ours is not yet there to send it.
    assert re.search(words, last if method == "forkserver" or script is BELOW else done.stderr)
    assert method == "forkserver" or script is BELOW or "runs the top of the script first" in last


# -- entries of torch's collate map ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "collate_fn"),
    [
        pytest.param("spawn", None, marks=pytest.mark.full),
        ("spawn", lambda samples: default_collate(samples)),
        pytest.param(Spawn(preload=False), None, marks=pytest.mark.full),
        pytest.param(SharedMemory(start_method="spawn"), None, marks=pytest.mark.full),
    ],
    ids=["spawn", "own collate_fn", "one by one", "multiprocessing"],
)
def test_entries_of_the_collate_map_are_sent_with_a_loader(
    backend: Any, collate_fn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Number:
        def __init__(self, value: int) -> None:
            self.value = value

    def numbers(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return torch.tensor([number.value for number in batch])

    def reversed_strings(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return [text[::-1] for text in batch]

    monkeypatch.setitem(default_collate_fn_map, Number, numbers)
    monkeypatch.setitem(default_collate_fn_map, str, reversed_strings)
    dataset = Samples(lambda index: (Number(index), f"number {index}"), 2)
    [[found, texts]] = load(dataset, backend, collate_fn=collate_fn, batch_size=2)
    assert (found.tolist(), texts) == ([0, 1], ["0 rebmun", "1 rebmun"])
    items = Pipeline.from_dataset([[Number(3)]])
    collate = collate_fn or default_collate
    assert list(items.map(collate, backend=backend, num_workers=1)) == [torch.tensor([3])]
