"""Conversion of a torch loader to a hybridloader loader, or an error that gives the reason against it.

The conversion does not change the torch loader, reads no data, draws no random number and starts no
worker. Both loaders draw from the same samplers and generators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridloader._support.text import warn
from hybridloader._support.user_objects import has
from hybridloader.engine.contract import get_backend
from hybridloader.loader.dataloader import DataLoader
from hybridloader.loader.options import Options, in_keywords

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
"""Names that a subclass may define, because they have no effect after the constructor has run."""


@in_keywords
def from_torch(
    loader: torch.utils.data.DataLoader[Any],
    backend: str | Backend | None = None,
    **options: Unpack[OptionWords],
) -> DataLoader:
    """Convert a torch loader to an equal `hybridloader.DataLoader`, on a backend of your choice.

    Both loaders share the dataset, samplers, generator and functions. Attributes that were set on
    `loader` after its construction are copied. An attribute with the name of a hybridloader option is
    not copied and causes a warning. Iterators and persistent workers of `loader` stay with it.

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
    _refuse(loader)
    if backend is not None:
        get_backend(backend)
    parsed = Options.parsed("from_torch()", options)
    made = DataLoader.__new__(DataLoader)
    # Not by the constructor: it would wrap a data pipe again, and refuses a batch sampler together with
    # that sampler's batch size.
    # torch does not record whether the prefetch was passed.
    known = {"_prefetch_chosen": True, **vars(loader)}
    taken = sorted(vars(loader).keys() & {"backend", *Options._fields})
    if taken:
        warn(
            f"this loader has attributes with names of options of hybridloader.DataLoader: "
            f"{', '.join(taken)}; their values are not used. If they are meant as options, pass them to "
            "from_torch()",
            "attributes-not-used",
        )
    vars(made).update(known, **parsed._asdict(), backend=backend, _iterator=None)
    made._plan().check()
    return made


def _refuse(loader: Any) -> None:
    """Raise `TypeError` for an object that can't be converted."""
    import torch.utils.data

    kind = type(loader)
    if isinstance(loader, DataLoader):
        raise TypeError(
            f"this {kind.__name__} is a hybridloader.DataLoader already; set its attributes instead, as "
            "in loader.backend = 'threads'; the next iter(loader) uses them"
        )
    if _is_fastais(loader):
        raise TypeError(
            "this is fastai's kind of loader, which can't be converted: its workers keep their position "
            "on the loader itself (`it`, `offs`), which threads would overwrite for each other, and it "
            "makes torch's private iterators itself. Make a hybridloader.DataLoader over its dataset, "
            "with a collate_fn, or keep this loader"
        )
    if not isinstance(loader, torch.utils.data.DataLoader):
        raise TypeError(f"from_torch takes a torch.utils.data.DataLoader, {_instead(loader)}")
    lost = sorted(_lost(kind))
    if lost:
        shown = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
        raise TypeError(
            f"{kind.__name__} is a subclass of torch's DataLoader that defines {shown}, which "
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
        loader = "a loader of it" if issubclass(given, TorchLoader) else "a torch DataLoader"
        return f"not the class {given.__name__}; pass {loader}"
    name = f"not a {type(given).__name__}"
    if isinstance(given, _BaseDataLoaderIter):
        return f"{name}; pass the loader, not an iterator over it"
    if isinstance(given, Pipeline):
        return f"{name}; a pipeline has a backend for each step, in map(..., backend=...)"
    if hasattr(type(given), "__getitem__") or hasattr(type(given), "__iter__"):
        return f"{name}; for a dataset, make a hybridloader.DataLoader(dataset, ...)"
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
