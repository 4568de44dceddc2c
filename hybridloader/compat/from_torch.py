"""Conversion of a loader of torch's to one of ours, or the reason why it can't be converted.

The given loader is not changed, and both draw from the same samplers and generators. Nothing is read,
drawn or started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridloader._support.attributes import has
from hybridloader._support.caller import warn
from hybridloader.engine.registry import get_backend
from hybridloader.loader.dataloader import DataLoader
from hybridloader.loader.options import Options

if TYPE_CHECKING:
    import torch.utils.data
    from typing_extensions import Unpack

    from hybridloader.engine.contract import Backend
    from hybridloader.loader.options import OptionWords

# fmt: off
_NOT_LOST = {
    "__abstractmethods__", "__annotate__", "__annotate_func__", "__annotations__",
    "__annotations_cache__", "__dict__", "__doc__", "__firstlineno__", "__init__", "__module__",
    "__orig_bases__", "__parameters__", "__qualname__", "__static_attributes__", "__type_params__",
    "__weakref__", "_abc_impl",
}
# fmt: on
"""Names that a subclass may define without effect on a loader whose constructor has run."""


def from_torch(
    loader: torch.utils.data.DataLoader[Any],
    backend: str | Backend | None = None,
    **options: Unpack[OptionWords],
) -> DataLoader:
    """Make a `hybridloader.DataLoader` that equals `loader`, on a backend of your choice.

    Dataset, samplers, generator and functions are the same objects, and attributes that were set on the
    loader since it was made are kept; those with the name of an option of ours are not, and warn.
    Iterators and persistent workers of `loader` stay with it.

    Parameters
    ----------
    loader
        A loader of torch's `DataLoader`, or of a subclass that adds nothing but a constructor.
    backend
        As in `hybridloader.DataLoader`.
    **options
        The other keywords of `hybridloader.DataLoader`.

    Raises
    ------
    TypeError
        It is no loader, or one of ours, or of a subclass with methods that ours would not have; the
        message says what to do instead.
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
    _refuse(loader)
    if backend is not None:
        get_backend(backend)
    said = Options.said("from_torch()", options)
    made = DataLoader.__new__(DataLoader)
    # Not by the constructor: it would wrap a data pipe again, and takes no batch sampler together with
    # that sampler's batch size.
    known = {"_prefetch_chosen": True, **vars(loader)}  # as of torch's it is not known
    taken = sorted(vars(loader).keys() & {"backend", *Options._fields})
    if taken:
        warn(
            f"this loader has attributes of its own that are options of hybridloader.DataLoader: "
            f"{', '.join(taken)}; their values are not taken over. Give those to from_torch() that you "
            "mean as options"
        )
    vars(made).update(known, **said._asdict(), backend=backend, _iterator=None)
    made._plan().check()
    return made


def _refuse(loader: Any) -> None:
    """Raise `TypeError` for an object that can't be converted."""
    import torch.utils.data

    kind = type(loader)
    if isinstance(loader, DataLoader):
        raise TypeError(
            f"this {kind.__name__} is a hybridloader.DataLoader already; set its attributes, as in "
            "loader.backend = 'threads', which the next iter(loader) reads"
        )
    if _is_fastais(loader):
        raise TypeError(
            "this is fastai's kind of loader, whose workers keep their place on the loader itself "
            "(`it`, `offs`): threads would overwrite it for each other. It makes torch's private "
            "iterators by itself, too, so that nothing can take their place. Make a "
            "hybridloader.DataLoader over its dataset, with a collate_fn, or leave it as it is"
        )
    if not isinstance(loader, torch.utils.data.DataLoader):
        raise TypeError(f"from_torch takes a torch.utils.data.DataLoader, {_instead(loader)}")
    lost = sorted(_lost(kind))
    if lost:
        shown = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
        raise TypeError(
            f"{kind.__name__} is a subclass of torch's DataLoader with {shown} of its own, which "
            f"a plain hybridloader.DataLoader would not have; {_way(kind, lost)}"
        )


def _is_fastais(loader: Any) -> bool:
    kinds = loader.__mro__ if isinstance(loader, type) else type(loader).__mro__
    return any(k.__module__.partition(".")[0] == "fastai" for k in kinds) or (
        has(loader, "fake_l") and has(loader, "create_batches")
    )


def _instead(given: Any) -> str:
    from torch.utils.data import DataLoader as TorchLoader
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from hybridloader.pipeline.pipeline import Pipeline

    if isinstance(given, type):
        does = "a loader: make one first" if issubclass(given, TorchLoader) else "one that was made"
        return f"not the class {given.__name__}; give {does}"
    name = f"not a {type(given).__name__}"
    if isinstance(given, _BaseDataLoaderIter):
        return f"{name}; give the loader, not an iterator over it"
    if isinstance(given, Pipeline):
        return f"{name}; a pipeline has a backend for each step, in map(..., backend=...)"
    if hasattr(type(given), "__getitem__") or hasattr(type(given), "__iter__"):
        return f"{name}; of a dataset make a hybridloader.DataLoader(dataset, ...)"
    return name


def _lost(kind: type) -> set[str]:
    """Return the names that a class defines beyond torch's `DataLoader` and constructors."""
    import torch.utils.data

    known = torch.utils.data.DataLoader.__mro__
    own = {name for k in kind.__mro__ if k not in known for name in vars(k)}
    return own - _NOT_LOST


def _way(kind: type, lost: list[str]) -> str:
    if kind.__module__.partition(".")[0] == "accelerate":
        return (
            "accelerate's loaders hold another one: see hybridloader.integrations.accelerate, or give "
            "from_torch their base_dataloader"
        )
    if {"state_dict", "load_state_dict"} <= set(lost):
        return (
            "a hybridloader.DataLoader has a state_dict() and a load_state_dict() itself: make one with "
            "the arguments of this one"
        )
    return (
        "make a class that is both, and use it in place of this one: "
        f"class Mine({kind.__module__}.{kind.__qualname__}, hybridloader.DataLoader): pass"
    )
