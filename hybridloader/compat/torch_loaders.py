"""torch's loaders on hybridloader's engine: one is converted, or the engine is installed under all.

`from_torch` converts a loader, or raises an error that gives the reason against it. It does not change
the torch loader, reads no data, draws no random number and starts no worker. Both loaders draw from the
same samplers and generators.

`install`, for code that can't be edited, replaces one method of torch's `DataLoader`, `_get_iterator`,
which makes the iterator of an epoch. The class stays the same, and so does every ``isinstance``,
subclass and constructor. A subclass that overrides `_get_iterator` (PyG's, ultralytics', torchdata's)
still takes precedence. hybridloader's loaders, and the path of a batch, don't change. A loader that
hybridloader would refuse is left to torch's method, so that code which ran before still runs.
"""

from __future__ import annotations

import importlib
import sys
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hybridloader._support import system
from hybridloader._support.text import first_few, short, warn_once
from hybridloader._support.torch_env import when_imported
from hybridloader._support.user_objects import attribute
from hybridloader.engine.contract import get_backend
from hybridloader.errors import BackendUnavailable, ForkUnsafe, WorkerPicklingError
from hybridloader.loader.options import Options, in_keywords

if TYPE_CHECKING:
    import torch.utils.data
    from torch.utils.data.dataloader import _BaseDataLoaderIter
    from typing_extensions import Unpack

    from hybridloader.engine.contract import Backend
    from hybridloader.loader.dataloader import DataLoader
    from hybridloader.loader.options import OptionWords
    from hybridloader.loader.plan import LoaderPlan


# fmt: off
_NOT_LOST = {
    "__abstractmethods__", "__annotate__", "__annotate_func__", "__annotations__",
    "__annotations_cache__", "__dict__", "__doc__", "__firstlineno__", "__init__", "__module__",
    "__orig_bases__", "__parameters__", "__qualname__", "__static_attributes__", "__type_params__",
    "__weakref__", "_abc_impl",
}
# fmt: on
"""Names that a subclass may define, because they have no effect after the constructor has run."""


@in_keywords
def from_torch(
    loader: torch.utils.data.DataLoader[Any],
    backend: str | Backend | None = None,
    **options: Unpack[OptionWords],
) -> DataLoader:
    """Convert a torch loader to an equal `hybridloader.DataLoader`, on a backend of your choice.

    Both loaders share the dataset, samplers, generator and functions. Attributes that were set on
    `loader` after its construction are copied, but for those with the name of a hybridloader option.
    Iterators and persistent workers of `loader` stay with it.

    Parameters
    ----------
    loader
        A `torch.utils.data.DataLoader`, or a subclass that adds nothing but a constructor.
    backend
        As in `hybridloader.DataLoader`.
    **options
        The other keywords of `hybridloader.DataLoader`.

    Raises
    ------
    TypeError
        `loader` is not a loader, is a hybridloader loader already, or its class has methods that would
        be lost. The message names an alternative.
    BackendUnavailable, ValueError
        There is no such backend, or the loader can't have that option.

    Examples
    --------
    >>> import torch
    >>> from hybridloader import from_torch
    >>> theirs = torch.utils.data.DataLoader(range(6), 3, num_workers=2)
    >>> [batch.tolist() for batch in from_torch(theirs, backend="threads")]
    [[0, 1, 2], [3, 4, 5]]
    """
    from hybridloader.loader.dataloader import DataLoader

    _refuse(loader)
    if backend is not None:
        get_backend(backend)
    parsed = Options.parsed("from_torch()", options)
    made = DataLoader.__new__(DataLoader)
    # Not by the constructor: it would wrap a data pipe again, and refuses a batch sampler together with
    # that sampler's batch size.
    made._prefetch_chosen = True  # torch does not record whether the prefetch was passed
    vars(made).update(vars(loader), **parsed._asdict(), backend=backend, _iterator=None)
    made._plan().check()
    return made


def _refuse(loader: Any) -> None:
    """Raise `TypeError` for an object that can't be converted."""
    import torch.utils.data

    from hybridloader.loader.dataloader import DataLoader

    kind = type(loader)
    if isinstance(loader, DataLoader):
        raise TypeError(
            f"this {kind.__name__} is a hybridloader.DataLoader already; set its attributes instead, as "
            "in loader.backend = 'threads'; the next iter(loader) uses them"
        )
    if not isinstance(loader, torch.utils.data.DataLoader):
        raise TypeError(
            f"from_torch takes a torch.utils.data.DataLoader, not {short(loader)}; for a dataset, make "
            "a hybridloader.DataLoader(dataset, ...)"
        )
    known = torch.utils.data.DataLoader.__mro__
    own = {name for k in kind.__mro__ if k not in known for name in vars(k)}
    lost = sorted(own - _NOT_LOST)
    if lost:
        raise TypeError(
            f"{kind.__name__} is a subclass of torch's DataLoader that defines {first_few(lost)}, "
            f"which a plain hybridloader.DataLoader would not have; {_way(kind, lost)}"
        )


def _way(kind: type, lost: list[str]) -> str:
    if kind.__module__.partition(".")[0] == "accelerate":
        return (
            "accelerate's loaders wrap another loader: see hybridloader.integrations.accelerate, or "
            "pass their base_dataloader to from_torch"
        )
    if {"state_dict", "load_state_dict"} <= set(lost):
        return (
            "a hybridloader.DataLoader has a state_dict() and a load_state_dict() itself: make one with "
            "the same arguments"
        )
    return (
        "derive a class from both and use it instead: "
        f"class Mine({kind.__module__}.{kind.__qualname__}, hybridloader.DataLoader): pass"
    )


# -- the engine under all loaders of a process


@dataclass
class _Place:
    """State of the process: the replaced method of torch's class."""

    lock: Any = field(default_factory=lambda: system.renewed_in_forks(threading.Lock()))
    """Held while one of the other attributes changes."""
    installed: Installation | None = None
    """The installation that makes iterators, or None. Read without the lock."""
    torchs: Any = None  # torch's method, after ours has replaced it


_place = _Place()


class Installation:
    """Result of `install`. Its `uninstall`, or the end of a ``with`` block, undoes it.

    Attributes
    ----------
    backend
        Backend as passed.
    options
        The other keywords of the call.
    where
        File and line that called `install`.
    """

    def __init__(self, backend: str | Backend | None, options: Options, where: str) -> None:
        self.backend, self.options, self.where = backend, options, where

    @property
    def active(self) -> bool:
        """True if this installation runs torch's loaders now."""
        return _place.installed is self

    def uninstall(self) -> None:
        """Have torch run its loaders again, from the next ``iter`` on.

        Further calls do nothing. Existing iterators continue unchanged. If other code has replaced the
        same method of torch since, its replacement stays, and gets torch's loaders again.
        """
        with _place.lock:
            if not self.active:
                return
            _place.installed = None
            _take_out()

    def iterator(self, loader: Any) -> _BaseDataLoaderIter:
        """Return an iterator over a torch loader: torch's if hybridloader refuses the loader."""
        import torch

        from hybridloader.loader.iterator import LoaderIterator
        from hybridloader.loader.plan import LoaderPlan

        try:
            plan = LoaderPlan.of(loader, self.backend, self.options)
            plan.check_arguments()
            defaults = {name: Options._field_defaults[name] for name in plan.option_problems}
            plan = replace(plan, options=self.options._replace(**defaults))
            self._check_context(plan)
        except (TypeError, ValueError) as error:  # `BackendUnavailable` is a ValueError
            return _torchs_own(loader, error)
        if self.backend is None or not get_backend(self.backend).in_process:
            loader.check_worker_number_rationality()  # as torch's method does
        generator = torch.default_generator if loader.generator is None else loader.generator
        before = generator.get_state()
        try:
            return LoaderIterator(loader, plan)
        except ForkUnsafe:  # torch's loader would fork as well
            generator.set_state(before)
            raise
        except (BackendUnavailable, WorkerPicklingError) as error:
            # No worker has started; only the sampler's iterator was made. So torch draws the same.
            generator.set_state(before)
            return _torchs_own(loader, error)

    def _check_context(self, plan: LoaderPlan) -> None:
        """Raise `BackendUnavailable` if the loader's `multiprocessing_context` can't be used."""
        in_process = plan.asked is not None and plan.asked.in_process
        if plan.num_workers and not in_process:
            if plan.context_is_foreign:
                kind = type(plan.multiprocessing_context).__qualname__
                raise BackendUnavailable(
                    f"its multiprocessing_context, a {kind}, has its own kind of processes; leave it "
                    "out, or use install('threads'), which starts none"
                )
            if plan.contradiction is not None:
                warn_once(
                    f"a loader has multiprocessing_context={plan.start_method!r}, but "
                    f"install({self.backend!r}) determines how its workers start; "
                    "install('shared-memory') would leave that to the loader",
                    "install-start-method",
                )

    def __enter__(self) -> Installation:
        if not self.active:
            raise RuntimeError(f"the install() at {self.where} was undone; call install() again")
        return self

    def __exit__(self, *exc: object) -> None:
        self.uninstall()

    def __repr__(self) -> str:
        state = "active" if self.active else "undone"
        return f"<Installation backend={self.backend!r}, {state}, from {self.where}>"


@in_keywords
def install(backend: str | Backend | None = None, **options: Unpack[OptionWords]) -> Installation:
    """Run every `torch.utils.data.DataLoader` of this process on hybridloader's engine.

    This is for code that can't be edited, such as loaders inside a framework or a library. For a whole
    script see ``hybridloader run``.

    It takes effect at the next ``iter(loader)``, also for loaders that exist already. Existing iterators
    continue unchanged; a loader with persistent workers switches with its next iterator. It applies to
    this process and its forks, not to new processes.

    Parameters
    ----------
    backend
        As in `hybridloader.DataLoader`. A loader's `multiprocessing_context` only counts if the backend
        leaves the start method open (None, ``"shared-memory"``). Loaders without workers run in the
        calling thread with every backend.
    **options
        The other keywords of `hybridloader.DataLoader`, for all loaders. An option that a loader can't
        have is ignored for that loader: `task_timeout` without workers, and `threads_per_worker` with
        an iterable dataset.

    Warns
    -----
    UserWarning
        `hybridloader.DataLoader` would refuse a loader, for example because of an unknown start method
        or an object that can't be pickled or copied. The loader is left to torch. The warning is issued
        once for each reason, when an iterator is made.

    Returns
    -------
    Installation
        Undo it with its `uninstall()`, with `hybridloader.uninstall()`, or by using it as a context
        manager.

    Raises
    ------
    RuntimeError
        `install` is active already, or other code has replaced the same method of torch.
    BackendUnavailable, TypeError, ValueError
        There is no such backend, or an option has a wrong value. Nothing was changed.

    Examples
    --------
    >>> import torch
    >>> from hybridloader import install
    >>> loader = torch.utils.data.DataLoader(range(6), 3, num_workers=2)
    >>> with install("threads"):
    ...     [batch.tolist() for batch in loader]
    [[0, 1, 2], [3, 4, 5]]
    """
    if backend is not None:
        get_backend(backend)
    caller = sys._getframe(1)
    line = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    made = Installation(backend, Options.parsed("install()", options), line)
    if "torch" in sys.modules:
        importlib.import_module("torch.utils.data")
    with _place.lock:
        if _place.installed is not None:
            raise RuntimeError(
                f"install() was called already, at {_place.installed.where}, with "
                f"backend={_place.installed.backend!r}, and it applies to the whole process; call "
                "hybridloader.uninstall() first, or leave the `with` block"
            )
        if "torch" in sys.modules:
            _put_in()
        _place.installed = made
    when_imported("torch", _torch_is_here)
    return made


def uninstall() -> None:
    """Undo `install`. If nothing is installed, do nothing."""
    installed = _place.installed
    if installed is not None:
        installed.uninstall()


def _torch_is_here() -> None:
    importlib.import_module("torch.utils.data")
    with _place.lock:
        if _place.installed is not None:
            _put_in()


def _put_in() -> None:
    """Replace torch's method, under the lock. Raises `RuntimeError` if other code has replaced it."""
    from torch.utils.data import DataLoader

    there: Any = vars(DataLoader)["_get_iterator"]
    if there is _get_iterator:
        return
    code = attribute(there, "__code__")
    if code is not None and code.co_filename == DataLoader.__init__.__code__.co_filename:
        _place.torchs = there
        DataLoader._get_iterator = _get_iterator  # type: ignore[method-assign]
    else:
        raise RuntimeError(
            f"torch's DataLoader._get_iterator was replaced by {_name(there)} already, and install() "
            "would undo that; call install() before that replacement"
        )


def _take_out() -> None:
    """Restore torch's method, under the lock, unless other code has replaced ours."""
    if _place.torchs is None:
        return
    from torch.utils.data import DataLoader

    if vars(DataLoader)["_get_iterator"] is _get_iterator:
        DataLoader._get_iterator = _place.torchs  # type: ignore[method-assign]


def _get_iterator(self: Any) -> Any:
    """Make an iterator in place of torch's method of this name, while `install` is active."""
    from hybridloader.loader.dataloader import DataLoader

    installed = _place.installed
    if installed is None or isinstance(self, DataLoader):
        return _place.torchs(self)
    return installed.iterator(self)


def _torchs_own(loader: Any, refusal: Exception) -> _BaseDataLoaderIter:
    """Return torch's iterator over a loader that hybridloader refuses; warn once per reason."""
    warn_once(
        f"install() leaves a {type(loader).__name__} to torch, with torch's workers and without the "
        f"options of install(), because: {refusal}",
        "install-left-out",
    )
    iterator: _BaseDataLoaderIter = _place.torchs(loader)
    return iterator


def _name(function: Any) -> str:
    module = attribute(function, "__module__")
    return f"{module}.{attribute(function, '__qualname__', function)}"
