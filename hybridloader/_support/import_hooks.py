"""Hooks that run as soon as a module is imported: now, or right after its first import.

A worker process imports torch only if it needs it. If the user's code imports torch later, a hook
sets torch's seed and number of threads before that code uses torch.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, act: Callable[[], None]) -> None:
    """Call `act` once the module `name` has been imported.

    The import raises the errors of `act`. `act` may import `name`.
    """
    if name in sys.modules:
        act()
        return
    sys.meta_path.insert(0, _Finder(name, act))


class _Finder(MetaPathFinder):
    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name, self._act = name, act
        self._looking = threading.local()  # per thread: another may import the module meanwhile

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or hasattr(self._looking, "now"):
            return None
        self._looking.now = True  # find_spec asks all finders in sys.meta_path, this one too
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            del self._looking.now
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenAct(spec.loader, self)
        return spec

    def imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._act()


class _ThenAct(Loader):
    """Loader that runs the module's own loader, and then `act`."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        module.__loader__ = self._loader  # user code sees the module's real loader
        if spec is not None:
            spec.loader = self._loader
        self._loader.exec_module(module)
        self._finder.imported()
