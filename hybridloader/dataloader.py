"""The drop-in: torch's DataLoader, run by our engine on a backend of your choice.

The constructor, the samplers, the seeds and the order of everything are torch's own, by inheritance.
What is ours is the iterator: one `Stage` on one backend. Nothing is cached between the constructor
and the iterator, because frameworks change attributes in between, and nothing but parameters is kept
under a public name, because frameworks rebuild loaders from ``vars(loader)``.
"""

from __future__ import annotations

import functools
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.utils.data
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _sharding_worker_init_fn,
)

from hybridloader.collate import without_torch
from hybridloader.contract import Backend, WorkerHandle
from hybridloader.errors import IteratorClosed
from hybridloader.fetch import Abandoned, Fetch, IterableFetch, MapFetch
from hybridloader.large import hint_at_large_container
from hybridloader.memory import DEFAULT_MEMORY
from hybridloader.messages import WorkerSpec
from hybridloader.refresh import Watch
from hybridloader.registry import get_backend
from hybridloader.scheduler import round_robin, round_robin_with_room
from hybridloader.stage import Stage

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from torch.utils.data import Dataset, Sampler


class DataLoader(torch.utils.data.DataLoader):  # type: ignore[type-arg]  # Lightning needs the bare class
    """A `torch.utils.data.DataLoader` whose workers are of the kind that you choose.

    All parameters of torch's loader come first, with torch's names, order and meaning; see
    `torch.utils.data.DataLoader`. Batches are the same, bit for bit, wherever torch's are
    deterministic.

    Parameters
    ----------
    dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, \
drop_last, timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor, \
persistent_workers, pin_memory_device, in_order
        As torch's. `timeout` is in seconds.
    backend
        Where the workers live: a name (``"inline"``, ``"threads"``, ``"fork"``, ``"spawn"``,
        ``"shared-memory"``, or that of an installed extension; case does not matter and ``_`` is
        as good as ``-``) or a `Backend` with options, such as
        ``SharedMemory(start_method="forkserver")``. None does what torch would do on this
        platform: processes, started as `multiprocessing_context` says, whose batches come back
        through shared memory. With ``num_workers=0`` the caller does the work, whatever the
        backend.
    threads_per_worker
        Threads inside each worker that fetch the samples of one batch at the same time, the worker's
        own among them. For samples that wait: 256 samples of 20 ms each are a batch after 0.35 s with
        16 threads, not after 5 s. With ``num_workers=0`` it is the caller who has them. The dataset
        must bear being read by several threads. They share the worker's random generators, the global
        ones and those of `get_worker_info().rng`, so which sample gets which random number depends on
        timing. A dataset with `__getitems__` is asked for a whole batch as ever.

    Raises
    ------
    BackendUnavailable
        A `ValueError`: there is no such backend (the message lists those there are), or, when the
        iterator is made, it can't serve here.
    ShippingError
        A `TypeError`, when the iterator is made: something must be sent to a process and can't be
        pickled. The message names the attribute.
    ValueError
        Parameters contradict each other.

    Examples
    --------
    >>> import torch
    >>> from hybridloader import DataLoader
    >>> data = torch.utils.data.TensorDataset(torch.arange(6))
    >>> [batch.tolist() for (batch,) in DataLoader(data, 2, num_workers=2, backend="threads")]
    [[0, 1], [2, 3], [4, 5]]
    """

    # ``DataLoader[int]``, as with torch's, although this class is not generic: see its base.
    __class_getitem__ = classmethod(types.GenericAlias)  # type: ignore[var-annotated]

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        backend: str | Backend | None = None,
        threads_per_worker: int = 1,
    ) -> None:
        if backend is not None:
            get_backend(backend)
        if prefetch_factor == 0:
            raise ValueError(
                "prefetch_factor=0 would ask the workers for nothing (torch's loader then yields "
                "nothing at all); use prefetch_factor=1, or num_workers=0"
            )
        self.backend = backend
        self.threads_per_worker = threads_per_worker
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        _check(self)

    def _get_iterator(self) -> _BaseDataLoaderIter:
        _check(self)
        self.check_worker_number_rationality()
        return LoaderIterator(self, _backend_of(self))

    def check_worker_number_rationality(self) -> None:
        """Warn, as torch does, when there are more worker processes than CPUs. Not for threads."""
        if self.backend is None or not get_backend(self.backend).in_process:
            super().check_worker_number_rationality()


def _check(loader: DataLoader) -> None:
    """Find what contradicts itself; also what was set after the constructor."""
    if loader.num_workers < 0 or loader.timeout < 0:
        raise ValueError(
            "num_workers and timeout must not be negative, "
            f"got {loader.num_workers} and {loader.timeout}"
        )
    if loader.num_workers == 0 and loader.timeout > 0:
        raise ValueError(
            f"timeout={loader.timeout} needs num_workers > 0: with 0 the caller itself makes the "
            "batch and can't stop waiting for it"
        )
    _check_threads(loader)
    context, backend = loader.multiprocessing_context, loader.backend
    if context is None or backend is None:
        return
    method, chosen = context.get_start_method(), get_backend(backend)
    if chosen.in_process:
        raise ValueError(
            f"backend={chosen.name!r} starts no process, so it contradicts "
            f"multiprocessing_context={method!r}; leave one of them out"
        )
    own = getattr(chosen, "start_method", chosen.name)
    if own is not None and own != method:
        raise ValueError(
            f"backend {chosen!r} contradicts multiprocessing_context={method!r}; "
            f"leave one of them out, or say SharedMemory(start_method={method!r})"
        )


def _check_threads(loader: DataLoader) -> None:
    threads: Any = loader.threads_per_worker
    if isinstance(threads, bool) or not isinstance(threads, int):
        raise TypeError(f"threads_per_worker must be an int, got {threads!r}")
    if threads < 1:
        raise ValueError(
            f"threads_per_worker must be at least 1 (the worker's own thread), got {threads}"
        )
    if threads == 1:
        return
    if loader._dataset_kind == _DatasetKind.Iterable:
        raise ValueError(
            f"threads_per_worker={threads} can't be had for an iterable dataset, which is read by one "
            "next() after the other; raise num_workers, and let __iter__ read a part for each worker"
        )
    if not loader._auto_collation:
        raise ValueError(
            f"threads_per_worker={threads} shares out the samples of a batch, and with batch_size=None "
            "there is one sample at a time; raise num_workers, or give a batch_size"
        )


def _backend_of(loader: DataLoader) -> Backend:
    """The backend to use now."""
    from hybridloader.backends.inline import Inline
    from hybridloader.backends.shared_memory import AsTorch, SharedMemory

    backend = None if loader.backend is None else get_backend(loader.backend)
    if loader.num_workers == 0:
        if isinstance(backend, Inline):
            return backend
        if backend is not None:
            _warn_idle(backend.name)
        return Inline(memory=getattr(backend, "memory", DEFAULT_MEMORY))
    context = loader.multiprocessing_context
    if backend is None:
        return AsTorch(None if context is None else context.get_start_method())
    if context is not None and isinstance(backend, SharedMemory):
        return replace(backend, start_method=context.get_start_method())
    return backend


@functools.cache
def _warn_idle(name: str) -> None:
    warnings.warn(
        f"backend={name!r} has no workers with num_workers=0: the caller does the work. "
        "Give num_workers to use it.",
        stacklevel=5,
    )


@functools.cache
def _warn_idle_threads(dataset: str) -> None:
    warnings.warn(
        f"threads_per_worker has no effect for {dataset}: its __getitems__ is asked for a whole batch "
        "at once. Raise num_workers, or use threads in __getitems__.",
        stacklevel=7,
    )


_TORCHS_NEXT = _BaseDataLoaderIter.__next__
_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


class _Weakly:
    """A method of the loader, without holding the loader.

    A worker thread that held it would keep the loader, and with persistent workers the iterator,
    alive for ever. As long as the iterator lives, it holds the method itself.
    """

    def __init__(self, method: types.MethodType) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, argument: Any) -> Any:
        method = self._method()
        if method is None:
            raise Abandoned
        return method(argument)


class LoaderIterator(_BaseDataLoaderIter):
    """One pass over a `DataLoader`, or, with persistent workers, one after the other.

    A context manager; leaving it closes the iterator. Closing it, letting it go or exhausting it (if
    the workers are not persistent) ends the workers.
    """

    def __init__(self, loader: DataLoader, backend: Backend) -> None:
        super().__init__(loader)
        self._backend = backend
        self._prefetch_factor = loader.prefetch_factor or 2
        self._in_order = loader.in_order
        self._threads = loader.threads_per_worker
        self._worker_init_fn = loader.worker_init_fn
        self._loader = weakref.ref(loader)
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            self._shard_datapipe()
            self._watch = None
        else:
            self._watch = Watch(self._dataset) if self._persistent_workers else None
        self._stage = self._start()
        if self._num_workers == 0:
            self._stage.begin(self._sampler_iter)
        else:
            # As torch: the sampler's iter() is called a second time here.
            self._reset(loader, first_iter=True)

    def _shard_datapipe(self) -> None:
        """Each rank and each worker reads its own part of a data pipe; the rules are torch's."""
        if self._num_workers == 0:
            pipe: Any = self._dataset
            torch.utils.data.graph_settings.apply_sharding(pipe, self._world_size, self._rank)
        else:
            self._worker_init_fn = functools.partial(
                _sharding_worker_init_fn, self._worker_init_fn, self._world_size, self._rank
            )

    def _start(self) -> Stage:
        if not self._backend.in_process:
            hint_at_large_container(self._dataset)
        spec = WorkerSpec(
            stage="DataLoader",
            workers=self._num_workers,
            fetch=self._fetch(),
            base_seed=int(self._base_seed),
            init_fn=self._for_workers(self._worker_init_fn),
            shared_seed=self._shared_seed,
        )
        return Stage(
            self._backend,
            spec,
            lookahead=self._prefetch_factor * self._num_workers,
            ordered=self._in_order,
            timeout=self._timeout,
            persistent=self._persistent_workers,
            dispatch=round_robin if self._in_order else round_robin_with_room,
        )

    def _for_workers(self, function: Any) -> Any:
        """What workers get for `function`."""
        if not self._backend.in_process:
            return without_torch(function)
        own = isinstance(function, types.MethodType) and function.__self__ is self._loader()
        return _Weakly(function) if own else function

    def _fetch(self) -> Fetch:
        dataset, batched = self._dataset, self._auto_collation
        collate_fn = self._for_workers(self._collate_fn)
        if self._dataset_kind == _DatasetKind.Iterable:
            datapipe = isinstance(dataset, IterDataPipe)
            return IterableFetch(dataset, collate_fn, batched, self._drop_last, datapipe)
        private = isinstance(dataset, MapDataPipe)
        fetch = MapFetch(dataset, collate_fn, batched, private, self._threads)
        if fetch.idle_threads:
            _warn_idle_threads(type(dataset).__name__)
        return fetch

    def _reset(self, loader: torch.utils.data.DataLoader[Any], first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        if self._stage.closed:  # a worker had died, or somebody closed it: start again
            self._stage = self._start()
        changes = () if first_iter or self._watch is None else self._watch.changes()
        self._stage.begin(self._sampler_iter, self._shared_seed, changes)

    def __next__(self) -> Any:
        # torch's enters a profiler range for every batch, which costs 15-30 us; only a running
        # profiler sees it. Whoever replaces torch's method (as monitors do) finds it called.
        if (
            _BaseDataLoaderIter.__next__ is not _TORCHS_NEXT
            or self._dataset_kind == _DatasetKind.Iterable
            or _profiling()
        ):
            return super().__next__()
        data = self._next_data()
        self._num_yielded += 1
        return data

    def _next_data(self) -> Any:
        data = next(self._stage)
        if self._pin_memory:
            pin: Any = torch.utils.data._utils.pin_memory.pin_memory
            data = pin(data, self._pin_memory_device)
        return data

    @property
    def _workers(self) -> Sequence[WorkerHandle]:
        return self._stage.handles

    def _shutdown_workers(self) -> None:
        self._stage.close()

    def close(self) -> None:
        """End the workers now. Any number of times, from any thread; at most some 2 seconds."""
        self._stage.close()

    def __enter__(self) -> LoaderIterator:
        if self._stage.closed:
            raise IteratorClosed("this iterator is closed")
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
