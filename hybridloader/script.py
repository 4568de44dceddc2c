"""A script or a module run as `python script.py` or `python -m module` would run it, in this process.

It becomes ``__main__``, with its own arguments and import path; it sees nothing of us but what was set
up before. Its tracebacks begin at its own first line, and how it ends is left to Python: exit codes,
Ctrl-C, exit handlers. Not `runpy`, which takes ``__main__`` away again before exit handlers and the
last threads have run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any, NamedTuple


class NotThere(Exception):
    """There is no such script or module; the message says so in one line."""


class Program(NamedTuple):
    """What is to run.

    Attributes
    ----------
    name
        What ``sys.argv[0]`` is.
    file
        What ``__file__`` is.
    read
        Gives the code; raises what the source is to blame for.
    spec
        Of a module; None for a script.
    folder
        The first place that it imports from.
    """

    name: str
    file: str
    read: Callable[[], CodeType]
    spec: ModuleSpec | None
    folder: str


def script(path: str) -> Program:
    """The file at `path`, or what is in the folder or archive there.

    Raises
    ------
    NotThere
        It can't be read.
    """
    file = os.path.join(os.getcwd(), path)  # as Python does: absolute, but not normalised
    if os.path.isdir(file) or _is_archive(file):
        spec = PathFinder.find_spec("__main__", [file])
        if spec is None or spec.origin is None:
            raise NotThere(f"there is no __main__.py in {path!r}")
        return Program(path, spec.origin, _reader(spec), spec, file)
    try:
        with io.open_code(file) as opened:
            source = opened.read()
    except OSError as error:
        raise NotThere(f"can't open the script {path!r}: {error.strerror}") from None
    folder = os.path.dirname(os.path.realpath(path))
    return Program(
        path, file, lambda: compile(source, file, "exec", dont_inherit=True), None, folder
    )


def module(name: str) -> Program:
    """The module called `name`, or the ``__main__`` of a package of that name.

    Raises
    ------
    NotThere
        There is none.
    """
    folder = os.getcwd()
    _import_from(folder)
    spec = _find(name)
    if spec.submodule_search_locations is not None:
        try:
            spec = _find(f"{name}.__main__")
        except NotThere:
            raise NotThere(f"{name!r} is a package without a __main__ module") from None
    if spec.origin is None or spec.loader is None:
        raise NotThere(f"{name!r} has no code that could be run")
    return Program(spec.origin, spec.origin, _reader(spec), spec, folder)


def run(program: Program, arguments: Sequence[str]) -> None:
    """Run it. Whatever ends it comes out of here, and then out of whoever called."""
    _import_from(program.folder)
    sys.argv[:] = [program.name, *arguments]
    main = ModuleType("__main__")
    spec = program.spec
    named: dict[str, Any] = {
        "__builtins__": sys.modules["builtins"],
        "__cached__": None if spec is None else spec.cached,
        "__file__": program.file,
        "__loader__": SourceFileLoader("__main__", program.file) if spec is None else spec.loader,
        "__package__": None if spec is None else spec.parent,
        "__spec__": spec,
    }
    if sys.version_info < (3, 14):  # where annotations are not evaluated before they are asked for
        named["__annotations__"] = {}
    vars(main).update(named)
    sys.modules["__main__"] = main
    try:
        exec(program.read(), vars(main))
    except BaseException as error:
        _hide_from(error)
        raise


def _is_archive(path: str) -> bool:
    import zipfile

    return os.path.isfile(path) and not path.endswith(".py") and zipfile.is_zipfile(path)


def _find(name: str) -> ModuleSpec:
    package, spec = name.rpartition(".")[0], None
    try:
        if not name.startswith("."):
            if package:  # here, so that what its code raises is not taken for what `find_spec` does
                importlib.import_module(package)
            with contextlib.suppress(ValueError):  # of "__main__"
                spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # A package on the way that is missing, or not a package; what its own code lacks is its matter.
        if error.name is None or not name.startswith(error.name):
            raise
    if spec is None:
        raise NotThere(f"there is no module {name!r}")
    return spec


def _reader(spec: ModuleSpec) -> Callable[[], CodeType]:
    loader: Any = spec.loader
    name = spec.name

    def read() -> CodeType:
        code: CodeType = loader.get_code(name)
        return code

    return read


def _import_from(folder: str) -> None:
    """As Python sets it up: first is where the script is, unless it was told not to (``-P``, ``-I``)."""
    safe = getattr(sys.flags, "safe_path", False) or sys.flags.isolated
    if not safe:
        sys.path[0] = folder


def _hide_from(error: BaseException) -> None:
    """Have the hook that tells of `error`, which may be the script's own, begin at the script's line."""
    hook, own = sys.excepthook, __file__

    def tell(
        kind: type[BaseException], raised: BaseException, traceback: TracebackType | None
    ) -> None:
        if raised is error:
            inner = last = traceback
            while last is not None:
                if last.tb_frame.f_code.co_filename == own:
                    inner = last.tb_next
                last = last.tb_next
            traceback = raised.__traceback__ = inner
        hook(kind, raised, traceback)

    sys.excepthook = tell
