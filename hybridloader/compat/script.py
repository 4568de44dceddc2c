"""Run a script or a module in this process, as `python script.py` or `python -m module` would.

It becomes ``__main__``, with its arguments and import path. Of this package it sees only the installed
engine. Python handles its end: exit codes, Ctrl-C and exit handlers. `runpy` only finds modules here: if
it ran them, it would remove ``__main__`` before exit handlers and the last threads have run.
"""

from __future__ import annotations

import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, NamedTuple


class NotThere(Exception):
    """There is no such script or module; the message is one line."""


class Program(NamedTuple):
    """Code to run."""

    name: str  # its ``sys.argv[0]``
    file: str
    code: CodeType
    spec: ModuleSpec | None  # spec of a module; None for a script
    folder: str  # first entry of its import path


def script(path: str) -> Program:
    """Return the file at `path`, or the ``__main__.py`` of the folder or archive there."""
    file = os.path.join(os.getcwd(), path)  # as Python does: absolute, but not normalized
    finder: Any = pkgutil.get_importer(file)
    if finder is not None:
        spec = finder.find_spec("__main__")
        if spec is None:
            raise NotThere(f"there is no __main__.py in {path!r}")
        return Program(path, spec.origin, spec.loader.get_code("__main__"), spec, file)
    try:
        with io.open_code(file) as opened:
            source = opened.read()
    except OSError as error:
        raise NotThere(f"can't open the script {path!r}: {error.strerror}") from None
    folder = os.path.dirname(os.path.realpath(path))
    return Program(path, file, compile(source, file, "exec", dont_inherit=True), None, folder)


def module(name: str) -> Program:
    """Return the module `name`, or the ``__main__`` of the package `name`."""
    folder = os.getcwd()
    _import_from(folder)
    # A private function, which the standard library's pdb and trace also call (Python 3.10 to 3.14).
    find: Any = runpy._get_module_details  # type: ignore[attr-defined]
    _, spec, code = find(name, NotThere)
    return Program(spec.origin, spec.origin, code, spec, folder)


def run(program: Program, arguments: Sequence[str]) -> None:
    """Run `program`. Its last exception, `SystemExit` included, is raised here."""
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
    if sys.version_info < (3, 14):  # later versions evaluate annotations on access
        named["__annotations__"] = {}
    vars(main).update(named)
    # The latter is multiprocessing's name for it in the processes that it spawns.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    exec(program.code, vars(main))


def _import_from(folder: str) -> None:
    """Put `folder` first on the import path, as Python does without ``-P`` and ``-I``."""
    if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
        sys.path[0] = folder
