"""``hybridloader run``: what a script sees and how it ends is as with ``python script.py``."""

from __future__ import annotations

import signal
import sys
import zipfile
from pathlib import Path

import pytest
from support.command import BAD_INPUT, main
from support.platforms import needs_fork, posix
from support.programs import python

SEES = """
import atexit, sys
print(sys.argv, sys.path[0], __name__, __file__, __package__, __builtins__ is not None)
print(__spec__ and (__spec__.name, __spec__.parent, __spec__.origin), __doc__, type(__loader__).__name__)
print(sys.modules["__main__"].__dict__ is globals(), __cached__, sorted(globals()))
class Mine: ...
atexit.register(lambda: print(sys.modules["__main__"].Mine is Mine, Mine.__module__))
print("torch" in sys.modules)
"""

ENDS = {
    "well": "print('done')",
    "with-a-code": "import sys; sys.exit(3)",
    "with-an-error": "def load():\n    raise ValueError('bad')\n\nload()\n",
    "not-compiled": "x = (\n",
    "by-its-own-hook": (
        "import sys, traceback\n"
        "sys.excepthook = lambda k, e, t: print('hook', k, traceback.extract_tb(t)[-1].name)\n"
        "raise KeyError(1)\n"
    ),
    "by-ctrl-c": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass\n",
    "with-a-thread": (
        "import threading\nt = threading.Thread(target=lambda: print(__name__))\nt.start()\n"
    ),
}


def outcome(*arguments: str, cwd: Path) -> tuple[str, str, int]:
    done = python(*arguments, cwd=cwd)
    return done.stdout, done.stderr, done.returncode


def alike(*arguments: str, cwd: Path) -> tuple[str, str, int]:
    """Run Python with `arguments`, check that ours does the same, and return the result.

    Tracebacks are the same from the first line of the script on.
    """
    wanted = outcome(*arguments, cwd=cwd)
    out, problems, code = outcome("-m", "hybridloader", "run", *arguments, cwd=cwd)
    first = f'  File "{cwd}'
    assert (out, code) == (wanted[0], wanted[2])
    assert problems.partition(first)[1:] == wanted[1].partition(first)[1:] or problems == wanted[1]
    return wanted


FORKSERVER = """
import torch
class Mine: ...
class Data(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, index): return Mine()
if __name__ == '__main__':
    loader = torch.utils.data.DataLoader(
        Data(), num_workers=1, collate_fn=list, multiprocessing_context='forkserver')
    print([type(one) is Mine for batch in loader for one in batch])
"""
SPAWN = """
import multiprocessing
class Mine: ...
def work(x):
    return Mine()
if __name__ == '__main__':
    with multiprocessing.get_context('spawn').Pool(1) as pool:
        print([type(one) is Mine for one in pool.map(work, [1, 2])])
"""


@pytest.mark.parametrize(
    "script",
    [SPAWN, pytest.param(FORKSERVER, marks=[pytest.mark.full, needs_fork])],  # the latter: 10 s
    ids=["spawn", "forkserver"],
)
def test_its_own_processes_find_its_main_module_and_send_its_objects(
    tmp_path: Path, script: str
) -> None:
    (tmp_path / "script.py").write_text(script)
    assert alike("script.py", cwd=tmp_path) == ("[True, True]\n", "", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "package" / "inner"
    package.mkdir(parents=True)
    for place in (tmp_path / "package", package):
        (place / "__init__.py").touch()
    for place in ("script.py", "package/inner/__main__.py", "package/part.py"):
        (tmp_path / place).write_text(SEES)
    with zipfile.ZipFile(tmp_path / "archive.pyz", "w") as archive:
        archive.writestr("__main__.py", SEES)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            ["./script.py", "--lr", "0.1", "--", "-m", "--backend", "threads"],
            marks=posix,  # on Windows Python keeps "./" in __file__
        ),
        ["-m", "package.part", "--help"],
        ["-m", "package.inner", "a b"],
        ["archive.pyz"],
    ],
    ids=["script", "module", "package", "archive"],
)
def test_a_script_sees_what_it_would_see_by_itself(folder: Path, arguments: list[str]) -> None:
    told, problems, code = alike(*arguments, cwd=folder)
    assert (problems, code) == ("", 0)
    assert told.endswith("False\nTrue __main__\n")


@pytest.mark.parametrize(
    "end", [pytest.param(end, marks=posix if "ctrl" in end else ()) for end in ENDS]
)
def test_a_script_ends_as_it_would_by_itself(tmp_path: Path, end: str) -> None:
    (tmp_path / "script.py").write_text(ENDS[end])
    told, problems, code = alike("script.py", cwd=tmp_path)
    wanted = {"well": 0, "with-a-code": 3, "by-ctrl-c": -signal.SIGINT, "with-a-thread": 0}
    assert code == wanted.get(end, 1)
    assert told or problems or code == 3


TRAINS = """
import multiprocessing, os, pickle, sys
os.environ["OMP_NUM_THREADS"] = "1"  # heeded only before torch is imported
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

class Squares(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return get_worker_info().worker_method, os.getpid() == {pid}, index ** 2

{pid_of}
loader = DataLoader(Squares(), batch_size=None, num_workers=1, {more})
print([(how, here, int(value)) for how, here, value in loader], torch.get_num_threads())
print(type(loader).__module__, type(loader) is torch.utils.data.DataLoader)
"""


@pytest.mark.parametrize(
    ("options", "where"),
    [
        pytest.param(["--backend", "threads"], ("thread", True), marks=pytest.mark.full),
        (["--backend=spawn"], ("multiprocessing", False)),
    ],
    ids=["threads", "spawn"],
)
def test_its_loaders_run_on_the_backend(
    tmp_path: Path, options: list[str], where: tuple[str, bool]
) -> None:
    """The script has no ``if __name__ == "__main__"`` and sets variables before it imports torch."""
    trains = TRAINS.format(pid="PID", pid_of="PID = os.getpid()", more="")
    (tmp_path / "train.py").write_text(trains)
    told, problems, code = outcome(
        "-W", "error", "-m", "hybridloader", "run", *options, "train.py", cwd=tmp_path
    )
    assert (problems, code) == ("", 0)
    values = [(*where, n * n) for n in range(4)]
    assert told == f"{values} 1\ntorch.utils.data.dataloader True\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope.py"], "can't open the script 'nope.py': No such file or directory"),
        (["-m", "nope"], "No module named nope"),
        (["-m", "os.nope"], "ModuleNotFoundError: __path__ attribute not found on 'os'"),
        (["-m", "xml"], "'xml' is a package and cannot be directly executed"),
        (["-m", "..x"], "Relative module names not supported"),
        (["."], "there is no __main__.py in '.'"),
        ([], "the following arguments are required: SCRIPT"),
        (["--backend", "thread", __file__], "'thread'; did you mean 'threads'? there are: inline "),
        (["--on-error", "ignore", __file__], 'on_error must be "raise", "skip"'),
        (["--task-timeout", "soon", __file__], "invalid float value: 'soon'"),
        (["--task-timeout", "-1", __file__], "task_timeout is seconds, 0 or more, not -1.0"),
        (["--threads-per-worker", "0", __file__], "must be at least 1, not 0"),
        (["--shuffle", __file__], "unknown arguments: --shuffle"),
        (["--back", "threads", __file__], "unknown arguments: --back"),
    ],
    ids=lambda value: "-".join(value).replace(__file__, "FILE") if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        code = main(["run", *arguments])
    except SystemExit as exited:
        code = exited.code
    told = capsys.readouterr().err
    assert code == BAD_INPUT
    assert told.startswith("hybridloader run: ")
    assert told.count("\n") == 1 + told.count("\nSee: ")
    assert says in told


def test_what_a_package_on_the_way_lacks_is_told_by_python(tmp_path: Path) -> None:
    """Only the module that was asked for is ours to miss."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import not_there_at_all")
    (package / "part.py").touch()
    out, told, code = outcome("-m", "hybridloader", "run", "-m", "package.part", cwd=tmp_path)
    assert (out, code) == ("", 1)
    assert told.startswith("Traceback")
    assert told.endswith("ModuleNotFoundError: No module named 'not_there_at_all'\n")
