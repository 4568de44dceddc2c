"""Adapter for accelerate, and so for the Trainer of transformers, that keeps hybridloader's loaders.

accelerate rebuilds every loader that it prepares: it reads torch's parameters from the loader by name,
and calls torch's `DataLoader` with them. The options of hybridloader (`backend`, `on_error`, ...) are
lost without a warning. `keep_loaders` makes accelerate rebuild a hybridloader loader as one; torch's
loaders are rebuilt as before.

`keep_loaders` changes five attributes of accelerate, all or none. Importing this module changes nothing,
and torch is never changed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from hybridloader._support.text import warn, warn_once
from hybridloader._version import __version__

TESTED = "1.15"
"""Release of accelerate with which all tests pass. Older releases, from 1.0 on, are built the same way,
but lose their count of epochs in `skip_first_batches`."""

KEY = "_hybridloader_source"
"""Attribute through which accelerate reads the loader itself, and parameter that passes it on."""

_INSTALL = 'accelerate is not installed. Install it with: pip install "accelerate>=1.15"'

_Change = tuple[Any, str, Any]
"""Owner of an attribute, its name and its new value."""


def keep_loaders() -> None:
    """Have accelerate keep hybridloader's loaders, with all their options.

    Call it at the beginning of the script, in each process that trains (`accelerate launch` runs the
    script in each). Further calls do nothing. From then on, `Accelerator.prepare`, `skip_first_batches`
    and a `Trainer` keep a `hybridloader.DataLoader`. This holds for shards, for dispatch, and for
    iterable datasets.

    With ``use_stateful_dataloader=True`` the loader saves and loads its state itself; torchdata's loader
    is not used. With ``seeding="sample"`` accelerate determines the epoch: it is the number of the
    epoch, or the argument of the prepared loader's `set_epoch`.

    A subclass is rebuilt as a plain `hybridloader.DataLoader`, since its constructor is unknown.

    Raises
    ------
    ImportError
        accelerate is not installed.
    RuntimeError
        accelerate lacks an attribute that is to be changed. Nothing was changed.

    Warns
    -----
    UserWarning
        This release of accelerate was not tested. Issued once.

    Examples
    --------
    >>> from accelerate import Accelerator  # doctest: +SKIP
    >>> from hybridloader.integrations.accelerate import keep_loaders
    >>> keep_loaders()  # doctest: +SKIP
    >>> loader = DataLoader(data, num_workers=4, backend="threads")  # doctest: +SKIP
    >>> loader = Accelerator().prepare(loader)  # doctest: +SKIP
    """
    try:
        accelerate = import_module("accelerate")
        data_loader = import_module("accelerate.data_loader")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != "accelerate":
            raise
        raise ImportError(_INSTALL) from error
    release = str(getattr(accelerate, "__version__", "unknown"))
    try:
        changes = _changes_of(data_loader)
    except AttributeError as error:
        raise RuntimeError(
            f"accelerate {release} is not built as expected (tested: {TESTED}), so it "
            f"can't keep hybridloader's loaders; nothing was changed. {error}. Use a tested "
            "release, or hybridloader.install(backend=...)"
        ) from error
    for home, name, value in changes:
        setattr(home, name, value)
    if changes and ".".join(release.split(".")[:2]) != TESTED:
        warn_once(
            f"hybridloader {__version__} was tested with accelerate {TESTED}, but this is "
            f"accelerate {release}",
            "accelerate-version",
        )


# -- changes to accelerate ----------------------------------------------------------------------------


def _changes_of(module: Any) -> list[_Change]:
    """Return the changes to accelerate; none if it has them. Raises `AttributeError` if it lacks one."""
    import torch.utils.data

    from hybridloader.loader.dataloader import DataLoader

    if module.DataLoader is _rebuilt:
        return []
    if module.DataLoader is not torch.utils.data.DataLoader:
        raise AttributeError("its DataLoader is not torch's")
    adapter = module.DataLoaderAdapter
    shard, dispatcher = module.DataLoaderShard, module.DataLoaderDispatcher
    parameters = {**module._PYTORCH_DATALOADER_KWARGS, KEY: None}
    return [
        (DataLoader, KEY, property(lambda loader: loader)),
        (module, "_PYTORCH_DATALOADER_KWARGS", parameters),
        (module, "DataLoader", _rebuilt),
        (adapter, "__init__", _adapting(adapter.__init__)),
        (shard, "set_epoch", _announcing(shard.set_epoch)),
        (dispatcher, "set_epoch", _announcing(dispatcher.set_epoch)),
    ]


def _rebuilt(*args: Any, _hybridloader_source: Any = None, **kwargs: Any) -> Any:
    """Make a loader of the kind that accelerate read; accelerate calls this instead of `DataLoader`."""
    source = _hybridloader_source
    if source is None:
        import torch.utils.data

        return torch.utils.data.DataLoader(*args, **kwargs)
    from hybridloader.loader.dataloader import DataLoader
    from hybridloader.loader.options import OptionWords
    from hybridloader.loader.plan import announce, record_of, upcoming

    make: Any = DataLoader
    own = {name: getattr(source, name) for name in ("backend", *OptionWords.__annotations__)}
    loader = make(*args, **own, **kwargs)
    loader._prefetch_chosen = source._prefetch_chosen  # else torch's default 2 would look chosen
    record = record_of(source)
    announce(loader, upcoming(source, record))
    if record.loaded is not None:
        warn(
            "this loader has loaded a state, but accelerate makes a new loader from it, which begins "
            "without a state; call load_state_dict() on the result of accelerator.prepare()",
            "accelerate-state",
        )
    return loader


def _adapting(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `DataLoaderAdapter.__init__` so that our loader is never passed to torchdata's."""

    @functools.wraps(init)
    def adapting(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get(KEY) is None:
            kwargs.pop(KEY, None)
            init(self, *args, **kwargs)
            return
        given = inspect.signature(init).bind(self, *args, **kwargs)
        stateful = given.arguments.get("use_stateful_dataloader", False)
        given.arguments["use_stateful_dataloader"] = False  # ours saves its state itself
        init(*given.args, **given.kwargs)
        self.use_stateful_dataloader = stateful

    return adapting


def _announcing(set_epoch: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    """Wrap a `set_epoch` of accelerate, which informs samplers and dataset, to inform the loader too."""

    @functools.wraps(set_epoch)
    def announcing(self: Any, epoch: int) -> None:
        set_epoch(self, epoch)
        from hybridloader.loader.dataloader import DataLoader
        from hybridloader.loader.plan import announce

        base = self.base_dataloader
        if isinstance(base, DataLoader):
            announce(base, epoch)

    return announcing
