"""Plan of a pass over a loader: the loader's attributes, read once when an iterator is made.

Nothing is cached from one iterator to the next, because frameworks change attributes in between. All
code behind an iterator gets the plan, never the loader. Contradictions are refused here.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _DatasetKind

from hybridloader._support.arguments import flag, function, seconds, whole
from hybridloader._support.attributes import attribute, has
from hybridloader._support.caller import warn_once
from hybridloader.backends.fallback import usable
from hybridloader.engine.contract import Backend
from hybridloader.engine.fetcher import Fetch
from hybridloader.engine.registry import get_backend
from hybridloader.engine.reorder import ReorderLimit
from hybridloader.loader.options import Options
from hybridloader.loader.record import LoaderRecord, record_of, upcoming
from hybridloader.loader.samplers import Samplers
from hybridloader.memory.limits import DEFAULT_MEMORY
from hybridloader.observe.stage_measures import options_of
from hybridloader.seeding.sample_seeds import SampleSeeding, parse_seeding


@dataclass(frozen=True)
class LoaderPlan:
    """Attributes of a loader, torch's or ours, as they are now, under torch's names."""

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
    iterable: bool
    """True if the dataset is iterable."""
    batched: bool
    """True if indices come from a sampler of batches."""
    samplers: Samplers
    length_called: int | None
    chosen: str | Backend | None
    """Backend, or its name, that the user has chosen; None takes what torch would take."""
    options: Options
    prefetch_chosen: bool
    """True if `prefetch_factor` was given, so that no more batches may be asked for."""
    state_every: int
    """Least number of a worker's results from one with the dataset's state to the next; 0: as often as
    is cheap."""
    epoch: int
    """Number of the next pass."""
    record: LoaderRecord

    @classmethod
    def of(cls, loader: Any, backend: str | Backend | None, options: Options) -> LoaderPlan:
        """Read `loader`, torch's or ours: only attributes that torch's loaders have."""
        plan, record = cls.__new__(cls), record_of(loader)
        # `__init__` of a frozen dataclass takes 8 us, and each `state_dict()` makes a plan, too.
        vars(plan).update(
            zip(_OF_THE_LOADER, _read(loader), strict=True),
            iterable=loader._dataset_kind == _DatasetKind.Iterable,
            batched=loader._auto_collation,
            samplers=Samplers.of(loader),
            length_called=loader._IterableDataset_len_called,
            chosen=backend,
            options=options,
            # torch's own loaders can't tell: theirs is 2 if None was given.
            prefetch_chosen=attribute(loader, "_prefetch_chosen", True)
            or loader.prefetch_factor not in (None, 2),
            state_every=attribute(loader, "_state_every", 0),
            epoch=upcoming(loader, record),
            record=record,
        )
        return plan

    def again(self, loader: Any) -> LoaderPlan:
        """Read `loader` for another pass of the same workers: as with torch, their number stays."""
        plan = LoaderPlan.of(loader, self.chosen, self.options)
        return replace(plan, num_workers=self.num_workers, prefetch_factor=self.prefetch_factor)

    @property
    def reorder(self) -> ReorderLimit | None:
        """Limit of the batches that may wait behind a late one; None: as many as torch asks for ahead.

        The sampler is then asked earlier than torch asks it, so nobody must be able to tell. If a pass
        is broken off, workers that stay have done more tasks than torch's: none may depend on that.
        """
        if self.iterable or self.prefetch_chosen or not (self.num_workers and self.in_order):
            return None
        if self.persistent_workers and not self.seeded_by_sample:
            return None
        return ReorderLimit(int(self.num_workers)) if self.samplers.unobserved else None

    @property
    def seeded_by_sample(self) -> bool:
        """True if what a sample draws depends on no worker."""
        return isinstance(parse_seeding(self.options.seeding), SampleSeeding)

    @property
    def on_threads(self) -> bool:
        """True if workers are threads of this process."""
        backend = self.backend
        return self.num_workers > 0 and backend.in_process and not backend.in_caller

    @property
    def takes_arrays(self) -> bool:
        """True if the dataset makes a batch of an array of indices, and nobody else looks at them."""
        if self.seeded_by_sample or self.options.on_error != "raise" or not self.in_order:
            return False  # `not in_order`: a state has the indices that were passed over
        # A subclass with a `__getitems__` of its own may want lists.
        parts = map(vars, type(self.dataset).__mro__)
        maker: Mapping[str, Any] = next((part for part in parts if "__getitems__" in part), {})
        return maker.get("takes_arrays") is True

    @property
    def joins(self) -> bool:
        """True if what is left over of the workers' shards is joined to full batches."""
        return self.options.shard_remainders == "join"

    @property
    def readers(self) -> int:
        """Number of workers that read the dataset; 1 if the caller does."""
        return max(1, int(self.num_workers))

    # -- checks --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse arguments that contradict each other. Raises `TypeError` or `ValueError`."""
        self.check_arguments()
        self.check_options()

    def check_options(self) -> None:
        """Refuse options that torch's loader has not. Raises `TypeError` or `ValueError`."""
        self.options.check()
        for problem in (*self.option_problems.values(), self.contradiction):
            if problem is not None:
                raise ValueError(problem)

    def check_arguments(self) -> None:
        """Refuse values that torch's constructor lets through, or that were set after it.

        They would fail in a worker, at the first batch, or never. Raises `TypeError` or `ValueError`.
        """
        # For torch, True is 1.
        if not isinstance(self.num_workers, bool):
            whole("num_workers", self.num_workers, instead="give an int, or 0 for no workers")
        if not (self.prefetch_factor is None or isinstance(self.prefetch_factor, bool)):
            instead = "give how many batches each worker is asked for ahead, or None for 2"
            whole("prefetch_factor", self.prefetch_factor, 1, instead=instead)
        if not isinstance(self.timeout, bool):
            seconds("timeout", self.timeout)
        function("collate_fn", self.collate_fn, "a function of a list of samples")
        if self.worker_init_fn is not None:
            function("worker_init_fn", self.worker_init_fn, "a function of the worker's number")
        for name in ("pin_memory", "persistent_workers", "in_order", "drop_last"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, int)):  # as torch; but any text is true
                flag(name, value)
        generator = self.samplers.generator
        if not (generator is None or isinstance(generator, torch.Generator)):
            raise TypeError(
                f"generator must be a torch.Generator, got {generator!r}; "
                "say torch.Generator().manual_seed(...), or None"
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
        """Reasons why this loader can't have an option that it was given, by the option's name."""
        found = {}
        threads, timeout = self.options.threads_per_worker, self.options.task_timeout
        if threads > 1 and self.iterable:
            found["threads_per_worker"] = (
                f"threads_per_worker={threads} can't serve an iterable dataset, which is read by one "
                "next() after the other; raise num_workers, and let __iter__ read a part in each worker"
            )
        elif threads > 1 and not self.batched:
            found["threads_per_worker"] = (
                f"threads_per_worker={threads} fetches the samples of a batch together, and with "
                "batch_size=None there is one sample at a time; raise num_workers, or give a batch_size"
            )
        if threads > 1 and self.options.seeding == "worker" and self.on_threads:
            found["seeding"] = (
                f"seeding='worker' seeds each worker once, and threads_per_worker={threads} threads "
                "of a worker would draw in any order; leave one of them out, or use seeding='sample'"
            )
        if timeout > 0 and self.num_workers == 0:
            found["task_timeout"] = (
                f"task_timeout={timeout} needs num_workers > 0: with 0 the calling thread makes the "
                "batch, and can't be stopped"
            )
        if self.options.shard_remainders == "join" and not (self.iterable and self.batched):
            found["shard_remainders"] = (
                "shard_remainders='join' joins the last samples of each worker's part of an iterable "
                "dataset; leave it out for a map-style dataset, and with batch_size=None"
            )
        return found

    def advisable(self, fetch: Fetch) -> dict[str, Any]:
        """Return the options that may be changed so that it changes something, and their values."""
        found = options_of(self.backend, fetch, int(self.num_workers))
        if self.multiprocessing_context is not None:  # which no other backend may contradict
            del found["backend"]
        if self.num_workers:
            found["persistent_workers"] = bool(self.persistent_workers)
        return found

    # -- backend -------------------------------------------------------------------------------------

    @functools.cached_property
    def asked(self) -> Backend | None:
        """Backend that the user has chosen, if any."""
        return None if self.chosen is None else get_backend(self.chosen)

    @functools.cached_property
    def backend(self) -> Backend:
        """Backend that runs the pass. Starts nothing."""
        from hybridloader.backends.inline import Inline
        from hybridloader.backends.process.backend import AsTorch

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
        hint = f", or say SharedMemory(start_method={method!r})" if known else ""
        return (
            f"backend {chosen!r} contradicts multiprocessing_context={method!r}; "
            f"leave one of them out{hint}"
        )

    @property
    def context_is_foreign(self) -> bool:
        """True if `multiprocessing_context` starts processes in a way of its own.

        MONAI's starts threads, for one. A backend with its start method would do something else.
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
        """Warn once of a backend that has no workers, and of a context whose processes are not used."""
        if self.num_workers and self.context_is_foreign:
            kind = type(self.multiprocessing_context).__name__
            warn_once(
                f"the {kind} that was given as multiprocessing_context has a Process of its own, which "
                f"is not used: {self.backend!r} starts its workers by {self.start_method!r} itself. Set "
                "up a worker in worker_init_fn, or use torch's DataLoader for this."
            )
        if self.asked is not None and not (self.num_workers or self.asked.in_caller):
            warn_once(
                f"backend={self.asked.name!r} has no workers with num_workers=0: the calling thread "
                "does the work. Give num_workers to use it."
            )


_OF_THE_LOADER = tuple(LoaderPlan.__dataclass_fields__)[:14]
"""Fields that have the names of attributes of the loader."""

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
    if has(dataset, "__getitems__"):  # torch asks the object, not its class
        return
    more = ""
    if hasattr(kind, "__iter__"):
        more = "; to read an iterable, use Pipeline.from_iterable, or a subclass of IterableDataset"
    raise TypeError(
        f"dataset must have __getitem__ and __len__, or be an IterableDataset, got {dataset!r}{more}"
    )
