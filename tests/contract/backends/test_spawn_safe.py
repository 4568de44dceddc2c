"""Fresh processes need no ``__main__`` guard, and take what can't be imported: classes of scripts,
functions and notebooks, lambdas, closures over tensors, partial functions.
"""

from __future__ import annotations

import json
import multiprocessing.context
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.programs import output, python

from hybridloader import DataLoader

SCRIPT = """
import functools, multiprocessing, sys
import torch
from hybridloader import DataLoader, Pipeline, Spawn

print("this script")
FRESH = {"fresh": Spawn(preload=False)}

class Scaled:
    def __init__(self, factor):
        self.factor = factor
    def __call__(self, value):
        return value * self.factor

def within(offset):
    class Local(torch.utils.data.Dataset):
        def __init__(self, steps):
            self.steps = steps
        def __len__(self):
            return 4
        def __getitem__(self, index):
            value = offset[index]
            for step in self.steps:
                value = step(value)
            return value
    return Local

steps = [Scaled(2), lambda value: value + 1, functools.partial(torch.add, other=torch.tensor(10))]
dataset = within(torch.arange(4))(steps)
sign = torch.tensor(-1)
init = functools.partial(lambda path, worker: print("worker", worker, flush=True), "x")
for method, backend in zip(sys.argv[1::2], sys.argv[2::2]):
    if method != "default":
        multiprocessing.set_start_method(method, force=True)
    loader = DataLoader(
        dataset, 2, num_workers=1, backend=FRESH.get(backend, backend), persistent_workers=True,
        collate_fn=lambda samples: torch.stack(samples) * sign, worker_init_fn=init,
    )
    for _ in range(2):
        print([batch.tolist() for batch in loader])
plus = lambda value: value + offset
offset = 5
pipe = Pipeline.from_iterable(lambda: range(3)).map(plus, backend="spawn", num_workers=1)
print(list(pipe.map(Scaled(10), backend="threads", num_workers=1)))
"""

METHODS = [
    ("default", "spawn"),
    ("default", "fresh"),  # each worker by itself
    ("forkserver", "spawn"),
    ("forkserver", "shared-memory"),  # multiprocessing's own default from Python 3.14 on
    ("spawn", "shared-memory"),  # as on macOS and Windows
]


@pytest.mark.parametrize(
    "methods",
    [
        pytest.param(METHODS[:1], id="one"),
        pytest.param(METHODS[1:], id="the others", marks=pytest.mark.full),
    ],
)
def test_a_script_without_a_guard_sends_what_it_likes(
    tmp_path: Path, methods: list[tuple[str, str]]
) -> None:
    """The script runs once: fresh workers do not run it again."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    batches = "[[-11, -13], [-15, -17]]"
    told = output(script, *(word for pair in methods for word in pair)).splitlines()
    assert told == [
        "this script",
        *["worker 0", batches, batches] * len(methods),
        "[50, 60, 70]",
    ]


CELLS = [
    """
    import functools
    import torch
    from hybridloader import DataLoader, Pipeline
    scale = torch.tensor(3)
    class Squares(torch.utils.data.Dataset):
        def __init__(self, transform):
            self.transform = transform
        def __len__(self):
            return 4
        def __getitem__(self, index):
            return self.transform(index) ** 2
    """,
    """
    def batches(dataset):
        loader = DataLoader(dataset, 4, num_workers=1, backend="spawn",
                            collate_fn=lambda samples: torch.stack(samples))
        return [batch.tolist() for batch in loader]
    print(batches(Squares(lambda index: index * scale)))
    """,
    """
    class Squares(Squares):  # the cell was edited and run again
        def __getitem__(self, index):
            return -super().__getitem__(index)
    scale = torch.tensor(1)
    print(batches(Squares(functools.partial(torch.mul, scale))))
    """,
    """
    numbers = Pipeline.from_dataset(range(3))
    print(list(numbers.map(lambda n: int(n * scale), backend="spawn", num_workers=1)))
    """,
]


EXECUTE = """
import json, sys
import nbclient, nbformat
cells = [nbformat.v4.new_code_cell(cell) for cell in json.load(sys.stdin)]
notebook = nbformat.v4.new_notebook(cells=cells)
nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
json.dump(["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells], sys.stdout)
"""


@pytest.mark.frameworks
def test_cells_of_a_notebook_send_what_they_define(tmp_path: Path) -> None:
    """In a process of its own: the client of a kernel keeps sockets for as long as its process lives."""
    for needed in ("nbclient", "nbformat", "ipykernel"):
        pytest.importorskip(needed)
    cells = json.dumps([textwrap.dedent(cell) for cell in CELLS])
    done = python("-c", EXECUTE, given=cells, IPYTHONDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        "",
        "[[0, 9, 36, 81]]\n",
        "[[0, -1, -4, -9]]\n",
        "[0, 1, 2]\n",
    ]


def test_a_copy_of_loky_under_its_name_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """joblib, which scikit-learn imports, registers one. Its processes import numpy at once."""
    monkeypatch.setitem(multiprocessing.context._concrete_contexts, "loky", None)  # type: ignore[attr-defined]
    loader: Any = DataLoader(range(6), 3, num_workers=1, backend="spawn", collate_fn=list)  # type: ignore[arg-type]
    assert list(loader) == [[0, 1, 2], [3, 4, 5]]


MODULE = """
from hybridloader import DataLoader

class Data:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return index

try:
    print([batch.tolist() for batch in DataLoader(Data(), 2, num_workers=1, backend="spawn")])
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


def test_a_module_that_loads_as_it_is_imported_starts_no_workers_in_workers(tmp_path: Path) -> None:
    """Each of them would import the module, and start others without end."""
    (tmp_path / "loads_when_imported.py").write_text(MODULE)
    refusal, batches = output("-c", "import loads_when_imported", cwd=tmp_path).split("\n", 1)
    assert refusal.startswith("BackendUnavailable: backend 'spawn' can't start workers here")
    assert batches.splitlines()[-1] == "[[0, 1]]"
