"""Has accelerate, and so the Trainer of transformers, keep our loaders as they are.

accelerate rebuilds every loader that it prepares: it reads torch's parameters off it by name, and calls
torch's `DataLoader` with them. What is ours (`backend`, `on_error`, ...) is lost without a word. Between
`keep_loaders` and its undoing, a loader of ours is rebuilt as one of ours; torch's are rebuilt as ever.
It changes five things of accelerate, all of them or none, and only if that is built as expected. It
never changes anything when it is imported, and never touches torch.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from hybridloader._support.attributes import attribute
from hybridloader._support.caller import warn

TESTED = ("1.15", "1.15")
"""The first and the last release of accelerate with which all tests pass. The older ones, from 1.0 on,
have the same shape, but lose their count of epochs in `skip_first_batches`."""

KEY = "_hybridloader_source"
"""Under this name accelerate reads from a loader of ours the loader itself, and passes it on."""

_INSTALL = 'accelerate is not installed. Install it with: pip install "accelerate>=1.15"'

_MISSING = object()


class KeptLoaders:
    """What `keep_loaders` gives: undoes it, when asked to or at the end of a ``with`` block."""

    def __init__(self) -> None:
        self._active = True

    def undo(self) -> None:
        """Have accelerate as it was, if nobody else has called `keep_loaders`. Any number of times.

        Loaders that were prepared in the meantime stay ours.

        Raises
        ------
        RuntimeError
            Somebody has changed the same things in accelerate since; nothing was done.
        """
        if not self._active:
            return
        if len(_holders) == 1:
            _undo(_changes)
            _changes.clear()
        _holders.remove(self)
        self._active = False

    def __enter__(self) -> KeptLoaders:
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()


_holders: list[KeptLoaders] = []
"""Who wants it; the last one to go undoes it."""

_changes: list[_Change] = []
"""What was changed in accelerate, in this order. Empty without holders."""


def keep_loaders() -> KeptLoaders:
    """Have accelerate keep hybridloader's loaders, with all that they were given.

    Call it once, at the beginning of the script, in each process that trains (`accelerate launch` runs
    the script in each). From then on, a `hybridloader.DataLoader` is still one behind
    `Accelerator.prepare` and `skip_first_batches`, in shards and in dispatch, also with an iterable
    dataset; so is what a `Trainer` prepares. Under ``use_stateful_dataloader=True`` it saves and loads
    its own state; torchdata's loader is not used. With ``seeding="sample"`` the epoch is accelerate's:
    the number of the pass, or what `set_epoch` of the prepared loader was told.

    A subclass is rebuilt as a plain `hybridloader.DataLoader`, since its constructor is not known.

    Returns
    -------
    KeptLoaders
        To undo it: by its `undo`, or as a context manager. Calling this twice is harmless; it ends with
        the last one that is undone.

    Raises
    ------
    ImportError
        accelerate is not installed.
    RuntimeError
        accelerate is not built as expected; the message says in what, and nothing was changed.

    Warns
    -----
    UserWarning
        Once: this release of accelerate is not one of those that were tested.

    Examples
    --------
    >>> from accelerate import Accelerator  # doctest: +SKIP
    >>> from hybridloader.integrations.accelerate import keep_loaders
    >>> keep_loaders()  # doctest: +SKIP
    >>> loader = DataLoader(data, num_workers=4, backend="threads")  # doctest: +SKIP
    >>> loader = Accelerator().prepare(loader)  # doctest: +SKIP
    """
    if not _holders:
        try:
            accelerate = import_module("accelerate")
            data_loader = import_module("accelerate.data_loader")
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.split(".")[0] != "accelerate":
                raise
            raise ImportError(_INSTALL) from error
        release = str(getattr(accelerate, "__version__", "unknown"))
        problems = list(_unexpected(data_loader)) or _change(data_loader)
        if problems:
            raise RuntimeError(
                f"accelerate {release} is not built as expected (tested: {'-'.join(TESTED)}), "
                "so hybridloader's loaders can't be kept in it; nothing was changed. "
                f"{'; '.join(problems)}. Use a release that was tested, or "
                "hybridloader.install(backend=...)"
            )
        _warn_if_untested(release)
    kept = KeptLoaders()
    _holders.append(kept)
    return kept


# -- what is changed ---------------------------------------------------------------------------------


class _Change:
    """One name in one object, or key in a dict: what was there, and what is there now."""

    def __init__(self, home: Any, name: str, value: Any) -> None:
        self._home, self._name, self._value = home, name, value
        self._before = self._now()

    def _now(self) -> Any:
        items = self._home if isinstance(self._home, dict) else vars(self._home)
        return items.get(self._name, _MISSING)

    @property
    def stands(self) -> bool:
        return self._now() is self._value

    def make(self) -> None:
        self._set(self._value)

    def undo(self) -> None:
        self._set(self._before)

    def _set(self, value: Any) -> None:
        if isinstance(self._home, dict):
            if value is _MISSING:
                del self._home[self._name]
            else:
                self._home[self._name] = value
        elif value is _MISSING:
            delattr(self._home, self._name)
        else:
            setattr(self._home, self._name, value)

    def __str__(self) -> str:
        home = self._home
        name = "_PYTORCH_DATALOADER_KWARGS" if isinstance(home, dict) else home.__name__
        return f"{name}.{self._name}"


def _undo(changes: list[_Change]) -> None:
    lost = [str(change) for change in changes if not change.stands]
    if lost:
        raise RuntimeError(
            f"{', '.join(lost)} was changed by somebody else after keep_loaders(); undo that first. "
            "Nothing was done"
        )
    for change in reversed(changes):
        change.undo()


def _change(accelerates: Any) -> list[str]:
    """Change all; if it has no effect, change it back and say why."""
    from hybridloader.loader.dataloader import DataLoader

    adapter = accelerates.DataLoaderAdapter
    shard, dispatcher = accelerates.DataLoaderShard, accelerates.DataLoaderDispatcher
    changes = [
        _Change(DataLoader, KEY, property(lambda loader: loader)),
        _Change(accelerates._PYTORCH_DATALOADER_KWARGS, KEY, None),
        _Change(accelerates, "DataLoader", _rebuilt),
        _Change(adapter, "__init__", _adapting(adapter.__init__)),
        _Change(shard, "set_epoch", _telling(shard.set_epoch)),
        _Change(dispatcher, "set_epoch", _telling(dispatcher.set_epoch)),
    ]
    for change in changes:
        change.make()
    problems = list(_ineffective(accelerates))
    if problems:
        _undo(changes)
    else:
        _changes.extend(changes)
    return problems


def _rebuilt(*args: Any, _hybridloader_source: Any = None, **kwargs: Any) -> Any:
    """What accelerate calls for `DataLoader`: a loader of the kind that it was read from."""
    source = _hybridloader_source
    if source is None:
        import torch.utils.data

        return torch.utils.data.DataLoader(*args, **kwargs)
    from hybridloader.loader.dataloader import DataLoader
    from hybridloader.loader.record import announce, record_of, upcoming

    make: Any = DataLoader
    loader = make(*args, **{name: getattr(source, name) for name in _own_parameters()}, **kwargs)
    announce(loader, upcoming(source, record_of(source)))
    return loader


@functools.cache
def _own_parameters() -> tuple[str, ...]:
    import torch.utils.data

    from hybridloader.loader.dataloader import DataLoader

    torchs = inspect.signature(torch.utils.data.DataLoader).parameters
    return tuple(name for name in inspect.signature(DataLoader).parameters if name not in torchs)


def _adapting(init: Callable[..., None]) -> Callable[..., None]:
    """`DataLoaderAdapter.__init__`, but that nothing of ours comes to torchdata's loader."""

    @functools.wraps(init)
    def adapting(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get(KEY) is None:
            kwargs.pop(KEY, None)
            init(self, *args, **kwargs)
            return
        given = inspect.signature(init).bind(self, *args, **kwargs)
        stateful = given.arguments.get("use_stateful_dataloader", False)
        given.arguments["use_stateful_dataloader"] = False  # ours has a state of its own
        init(*given.args, **given.kwargs)
        self.use_stateful_dataloader = stateful

    return adapting


def _telling(set_epoch: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    """`set_epoch` of what accelerate prepares, which tells samplers and dataset, but not the loader."""

    @functools.wraps(set_epoch)
    def telling(self: Any, epoch: int) -> None:
        set_epoch(self, epoch)
        from hybridloader.loader.dataloader import DataLoader
        from hybridloader.loader.record import announce

        base = self.base_dataloader
        if isinstance(base, DataLoader):
            announce(base, epoch)

    return telling


# -- whether it is as expected -----------------------------------------------------------------------


def _unexpected(module: types.ModuleType) -> Iterator[str]:
    """What in accelerate's module is not as the changes need it; in words."""
    import torch.utils.data

    if getattr(module, "DataLoader", None) is not torch.utils.data.DataLoader:
        yield f"{module.__name__}.DataLoader is not torch.utils.data.DataLoader"
    table = getattr(module, "_PYTORCH_DATALOADER_KWARGS", None)
    if not isinstance(table, dict) or not {"num_workers", "collate_fn"} <= table.keys():
        yield f"{module.__name__}._PYTORCH_DATALOADER_KWARGS is not a dict of torch's parameters"
    elif KEY in table:
        yield f"{module.__name__}._PYTORCH_DATALOADER_KWARGS has {KEY!r} already"
    for name, parameters, used in (
        ("prepare_data_loader", ("dataloader",), {"_PYTORCH_DATALOADER_KWARGS"}),
        ("skip_first_batches", ("dataloader",), {"_PYTORCH_DATALOADER_KWARGS", "DataLoader"}),
        (
            "DataLoaderAdapter.__init__",
            ("self", "dataset", "use_stateful_dataloader", "batch_sampler"),
            {"DataLoader", "base_dataloader"},
        ),
        ("DataLoaderShard.set_epoch", ("self", "epoch"), set()),
        ("DataLoaderDispatcher.set_epoch", ("self", "epoch"), set()),
    ):
        function: Any = module
        for part in name.split("."):
            function = vars(function).get(part) if function is not None else None
        if not isinstance(function, types.FunctionType):
            yield f"{module.__name__}.{name} is not there"
            continue
        found = tuple(inspect.signature(function).parameters)
        if found[: len(parameters)] != parameters:
            yield f"{module.__name__}.{name} takes {found}, not {parameters}"
        missing = used - _names(function.__code__)
        if missing:
            yield f"{module.__name__}.{name} does not use {', '.join(sorted(missing))}"


def _names(code: types.CodeType) -> set[str]:
    """The names that a function uses, also in what is written within it."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


def _ineffective(module: types.ModuleType) -> Iterator[str]:
    """What does not work although it looked right; tried on two loaders that read nothing."""
    import torch.utils.data

    from hybridloader.loader.dataloader import DataLoader

    samples: Any = [0]
    ours, torchs = DataLoader(samples), torch.utils.data.DataLoader(samples)
    for loader in (ours, torchs):
        kwargs = {KEY: attribute(loader, KEY)}
        try:
            made = module.DataLoaderAdapter(samples, batch_sampler=loader.batch_sampler, **kwargs)
            kind: Any = type(made.base_dataloader)
        except Exception as error:
            yield f"{module.__name__}.DataLoaderAdapter raised {type(error).__name__}: {error}"
            return
        if kind is not type(loader):
            yield f"{module.__name__}.DataLoaderAdapter made a {kind.__module__}.{kind.__name__}"
            return


@functools.cache
def _warn_if_untested(release: str) -> None:
    from packaging.version import InvalidVersion, Version

    try:
        within = (
            Version(TESTED[0]).release <= Version(release).release[:2] <= Version(TESTED[1]).release
        )
    except InvalidVersion:
        within = False
    if not within:
        from hybridloader._version import __version__

        warn(
            f"hybridloader {__version__} was tested with accelerate {'-'.join(TESTED)}, and "
            f"this is accelerate {release}. It is built as expected, so loaders are kept",
        )
