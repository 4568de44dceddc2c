"""Plan of an epoch of a loader: the loader's attributes, read once when an iterator is made.

The plan is not cached from one iterator to the next, because frameworks change attributes in between.
The code that an iterator calls gets the plan, never the loader. Contradictions are refused here.

Data about a loader that outlives an iterator are in its record, as long as the loader lives.
"""

from __future__ import annotations

import itertools
import multiprocessing
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _DatasetKind

from hybridloader._support.system import cached_property
from hybridloader._support.text import flag, function, seconds, warn_once, whole
from hybridloader._support.user_objects import has
from hybridloader.engine.contract import Backend, get_backend, usable
from hybridloader.engine.scheduler import ReorderLimit
from hybridloader.fetching.on_error import ErrorBudget
from hybridloader.loader.options import Options
from hybridloader.loader.progress import Progress
from hybridloader.loader.samplers import Samplers
from hybridloader.memory.limits import DEFAULT_MEMORY
from hybridloader.observe.observation import Observation
from hybridloader.seeding.sample_rng import SampleSeeding, parse_seeding


@dataclass(frozen=True)
class LoaderPlan:
    """Present attributes of a loader, torch's or hybridloader's, under torch's names."""

    dataset: Any
    batch_size: int | None
    drop_last: bool
    sampler: Any
    batch_sampler: Any
    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    in_order: bool
    timeout: float
    pin_memory: bool
    collate_fn: Any
    worker_init_fn: Any
    multiprocessing_context: Any
    iterable: bool  # True if the dataset is iterable
    batched: bool  # True if indices come from a sampler of batches
    samplers: Samplers
    length_called: int | None
    chosen: str | Backend | None
    """Backend, or its name, chosen by the user; None for processes started as in torch."""
    options: Options
    prefetch_chosen: bool
    """True if `prefetch_factor` was passed, so that no more batches may be in flight."""
    state_every: int
    """Least number of a worker's results from one with the dataset's state to the next; 0 for as often
    as is cheap."""
    epoch: int  # number of the next epoch
    record: LoaderRecord
    given: tuple[Any, ...]  # all that `check` and `warn` depend on

    @classmethod
    def of(cls, loader: Any, backend: str | Backend | None, options: Options) -> LoaderPlan:
        """Read `loader`, torch's or hybridloader's, through attributes that torch's loaders have."""
        plan, record = cls.__new__(cls), record_of(loader)
        values = _read(loader)
        # `__init__` of a frozen dataclass takes 8 us, and each `state_dict()` also makes a plan.
        vars(plan).update(
            zip(_OF_THE_LOADER, values, strict=True),
            given=(*values, backend, *options),
            iterable=loader._dataset_kind == _DatasetKind.Iterable,
            batched=loader._auto_collation,
            samplers=Samplers.of(loader),
            length_called=loader._IterableDataset_len_called,
            chosen=backend,
            options=options,
            # torch's loaders store 2 if None was passed, so an explicit 2 can't be distinguished.
            prefetch_chosen=getattr(loader, "_prefetch_chosen", True)
            or loader.prefetch_factor not in (None, 2),
            state_every=getattr(loader, "_state_every", 0),
            epoch=upcoming(loader, record),
            record=record,
        )
        return plan

    def again(self, loader: Any) -> LoaderPlan:
        """Read `loader` for another epoch of the same workers; as in torch, their number is kept."""
        plan = LoaderPlan.of(loader, self.chosen, self.options)
        return replace(plan, num_workers=self.num_workers, prefetch_factor=self.prefetch_factor)

    @property
    def reorder(self) -> ReorderLimit | None:
        """Limit of the batches that may wait for a late one; None for as many as torch prefetches.

        With a limit, the sampler is asked earlier than in torch, which must not be observable. If an
        epoch is ended early, persistent workers have done more tasks than torch's, so no batch may
        depend on the number of tasks.
        """
        if self.iterable or self.prefetch_chosen or not (self.num_workers and self.in_order):
            return None
        if self.persistent_workers and not self.seeded_by_sample:
            return None
        return ReorderLimit(int(self.num_workers)) if self.samplers.unobserved else None

    @cached_property
    def seeding(self) -> SampleSeeding | str | None:
        return parse_seeding(self.options.seeding)

    @property
    def seeded_by_sample(self) -> bool:
        """True if the random numbers of a sample don't depend on its worker."""
        return isinstance(self.seeding, SampleSeeding)

    @property
    def on_threads(self) -> bool:
        """True if workers are threads of this process."""
        backend = self.backend
        return self.num_workers > 0 and backend.in_process and not backend.in_caller

    def takes_arrays(self) -> bool:
        """Return True if the dataset takes an array of indices and no other code reads the indices."""
        if self.seeded_by_sample or self.options.on_error != "raise" or not self.in_order:
            # With `in_order=False`, a state has the indices that were not returned yet.
            return False
        # A subclass that overrides `__getitems__` may need lists.
        parts = map(vars, type(self.dataset).__mro__)
        maker: Mapping[str, Any] = next((part for part in parts if "__getitems__" in part), {})
        return maker.get("takes_arrays") is True

    @property
    def readers(self) -> int:
        """Number of workers that read the dataset; 1 if the caller does."""
        return max(1, int(self.num_workers))

    # -- checks --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse arguments that contradict each other. Raises `TypeError` or `ValueError`."""
        self.check_arguments()
        self.options.check()
        for problem in (*self.option_problems.values(), self.contradiction):
            if problem is not None:
                raise ValueError(problem)

    def check_arguments(self) -> None:
        """Refuse wrong values that torch's constructor accepts, or that were set after it.

        They would fail in a worker, at the first batch, or never. Raises `TypeError` or `ValueError`.
        """
        # torch accepts True as 1.
        if not isinstance(self.num_workers, bool):
            whole("num_workers", self.num_workers, instead="use an int, or 0 for no workers")
        if not (self.prefetch_factor is None or isinstance(self.prefetch_factor, bool)):
            instead = "use the number of batches that each worker prefetches, or None for 2"
            whole("prefetch_factor", self.prefetch_factor, 1, instead=instead)
        if not isinstance(self.timeout, bool):
            seconds("timeout", self.timeout)
        function("collate_fn", self.collate_fn, "a function that takes a list of samples")
        if self.worker_init_fn is not None:
            function(
                "worker_init_fn", self.worker_init_fn, "a function that takes the worker's number"
            )
        for name in ("pin_memory", "persistent_workers", "in_order", "drop_last"):
            value = getattr(self, name)
            # As in torch, but strings, which are all true, are refused.
            if not (value is None or isinstance(value, int)):
                flag(name, value)
        generator = self.samplers.generator
        if not (generator is None or isinstance(generator, torch.Generator)):
            raise TypeError(
                f"generator must be a torch.Generator, got {generator!r}; "
                "use torch.Generator().manual_seed(...), or None"
            )
        _check_dataset(self.dataset)
        for name in ("sampler", "batch_sampler"):
            given = getattr(self, name)
            if not (
                given is None or isinstance(given, Iterable) or hasattr(type(given), "__getitem__")
            ):
                raise TypeError(f"{name} must be an iterable of indices, got {given!r}")
        if self.num_workers < 0:
            raise ValueError(f"num_workers must not be negative, got {self.num_workers}")
        if self.num_workers == 0 and self.timeout > 0:
            raise ValueError(
                f"timeout={self.timeout} needs num_workers > 0: with 0 the calling thread makes "
                "the batch itself"
            )

    @property
    def option_problems(self) -> dict[str, str]:
        """Reasons why this loader can't have some of its options, by the option's name."""
        found = {}
        threads, timeout = self.options.threads_per_worker, self.options.task_timeout
        if threads > 1 and self.iterable:
            found["threads_per_worker"] = (
                f"threads_per_worker={threads} has no use for an iterable dataset, which is read by one "
                "next() at a time; raise num_workers, and let __iter__ read a part in each worker"
            )
        elif threads > 1 and not self.batched:
            found["threads_per_worker"] = (
                f"threads_per_worker={threads} fetches the samples of a batch together, but with "
                "batch_size=None there is one sample at a time; raise num_workers, or set batch_size"
            )
        if threads > 1 and self.options.seeding == "worker" and self.on_threads:
            found["seeding"] = (
                f"seeding='worker' seeds each worker once, but the {threads} threads of "
                f"threads_per_worker={threads} would draw in any order; leave one of them out, or use "
                "seeding='sample'"
            )
        if timeout > 0 and self.num_workers == 0:
            found["task_timeout"] = (
                f"task_timeout={timeout} needs num_workers > 0: with 0 the calling thread makes the "
                "batch, and can't be stopped"
            )
        return found

    # -- backend -------------------------------------------------------------------------------------

    @cached_property
    def asked(self) -> Backend | None:
        """Backend chosen by the user, or None."""
        return None if self.chosen is None else get_backend(self.chosen)

    @cached_property
    def backend(self) -> Backend:
        """Backend that runs the epoch. Starts nothing."""
        from hybridloader.backends.process.backend import AsTorch
        from hybridloader.backends.threads import Inline

        backend, method = self.asked, self.start_method
        if self.num_workers == 0:
            if backend is not None and backend.in_caller:
                return backend
            return Inline(memory=(backend and backend.memory) or DEFAULT_MEMORY)
        if backend is None:
            backend = AsTorch(method)
        elif method is not None:
            backend = backend.started_by(method) or backend
        return usable(backend)

    @property
    def start_method(self) -> str | None:
        """Start method of the loader's `multiprocessing_context`, if it has one."""
        context = self.multiprocessing_context
        return None if context is None else context.get_start_method()

    @property
    def contradiction(self) -> str | None:
        """Reason why `multiprocessing_context` contradicts the backend, if it does."""
        context = self.multiprocessing_context
        if context is None or self.chosen is None:
            return None
        method, chosen = context.get_start_method(), get_backend(self.chosen)
        if chosen.in_process:
            return (
                f"backend={chosen.name!r} starts no process, so it contradicts "
                f"multiprocessing_context={method!r}; leave one of them out"
            )
        if chosen.started_by(method) is not None:
            return None
        known = method in ("loky", *multiprocessing.get_all_start_methods())
        hint = f", or use SharedMemory(start_method={method!r})" if known else ""
        return (
            f"backend {chosen!r} contradicts multiprocessing_context={method!r}; "
            f"leave one of them out{hint}"
        )

    @property
    def context_is_foreign(self) -> bool:
        """True if `multiprocessing_context` starts other processes than those of the standard library.

        MONAI's, for example, starts threads. A backend with the same start method would not.
        """
        method = self.start_method
        if method in (None, "loky"):
            return False
        if method not in multiprocessing.get_all_start_methods():
            return True
        context: Any = multiprocessing.get_context(method)
        ordinary = multiprocessing.Process, context.Process
        kind: Any = self.multiprocessing_context.Process
        return kind not in ordinary

    def warn(self) -> None:
        """Warn once of a backend without workers, and of a context whose processes are not used."""
        if self.num_workers and self.context_is_foreign:
            kind = type(self.multiprocessing_context).__name__
            warn_once(
                f"the Process class of the {kind} that was passed as multiprocessing_context is not "
                f"used: {self.backend!r} starts its workers by {self.start_method!r}. Set up a worker "
                "in worker_init_fn, or use torch's DataLoader.",
                "context-not-used",
            )
        if self.asked is not None and not (self.num_workers or self.asked.in_caller):
            warn_once(
                f"backend={self.asked.name!r} has no workers with num_workers=0: the calling thread "
                "does the work. Set num_workers to use it.",
                "no-workers",
            )


_OF_THE_LOADER = tuple(LoaderPlan.__dataclass_fields__)[:14]
"""Fields with the names of attributes of the loader."""

_read = attrgetter(*_OF_THE_LOADER)


def _check_dataset(dataset: Any) -> None:
    kind = type(dataset)
    if hasattr(kind, "__getitem__") or isinstance(dataset, IterableDataset):
        return
    if isinstance(dataset, type):
        raise TypeError(
            f"dataset must be a dataset, got the class {dataset.__name__}; "
            f"make one: {dataset.__name__}(...)"
        )
    if has(dataset, "__getitems__"):  # torch looks it up on the object, not its class
        return
    more = ""
    if hasattr(kind, "__iter__"):
        more = "; to read an iterable, use Pipeline.from_iterable, or a subclass of IterableDataset"
    raise TypeError(
        f"dataset must have __getitem__ and __len__, or be an IterableDataset, got {dataset!r}{more}"
    )


# -- records of loaders
#
# A record is found by the loader's identity. It is not an attribute, because frameworks watch, copy
# and pickle the attributes of a loader. It is not in a `weakref.WeakKeyDictionary`, because a user's
# subclass may define ``__eq__``: without ``__hash__`` it would be refused, and equal loaders would share
# a record.

_numbers = itertools.count()


class LoaderRecord:
    """Record of one loader."""

    def __init__(self) -> None:
        self.begun: int | None = None
        """Number of the epoch that began last; None before, and after another epoch was announced."""
        self.progress: Progress | None = None  # progress of the latest epoch
        self.loaded: Mapping[str, Any] | None = None  # loaded state, until the next epoch begins
        self.given: Any = None
        """State as passed to `StatefulDataLoader`, and the error if it could not be loaded."""
        self.budget: ErrorBudget | None = None
        """Error records of the latest epoch with an `on_error`."""
        self.observation: Observation | None = None
        """Observation of the latest iterator, if it is observed."""
        self.report: weakref.WeakMethod[Callable[[], str]] | None = None
        """Method `report` of the latest iterator."""
        self.number = next(_numbers)
        """Number of the loader, by which traces and watches identify it."""


_records: dict[int, tuple[weakref.ref[Any], LoaderRecord]] = {}


def record_of(loader: Any) -> LoaderRecord:
    """Return the record of `loader`. Any thread may call it, and any may collect the loader."""
    place = id(loader)  # no other loader's before `forget` was called: memory is freed after that
    entry = _records.get(place)
    if entry is None:

        def forget(_: weakref.ref[Any]) -> None:
            _records.pop(place, None)

        entry = _records.setdefault(place, (weakref.ref(loader, forget), LoaderRecord()))
    return entry[1]


def announce(loader: Any, epoch: int) -> None:
    """Set the number of the next epoch, as an attribute of the loader that is pickled with it."""
    loader._epoch = epoch
    record_of(loader).begun = None


def upcoming(loader: Any, record: LoaderRecord) -> int:
    """Return the number of the next epoch: the announced one, or the one after the previous epoch."""
    begun = record.begun
    # 0 for a torch loader, which has no such attribute.
    return int(getattr(loader, "_epoch", 0)) if begun is None else begun + 1
