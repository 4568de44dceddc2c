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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.utils.data
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from hybridloader import epochs
from hybridloader.arguments import check_loader
from hybridloader.contract import Backend
from hybridloader.fallback import usable
from hybridloader.loader_iterator import LoaderIterator, latest_of, losses_of
from hybridloader.memory import DEFAULT_MEMORY
from hybridloader.on_error import parse
from hybridloader.registry import get_backend
from hybridloader.replay import samplers_of
from hybridloader.restart import RestartPolicy
from hybridloader.resuming import leave_for_epoch, load, resuming, state_of
from hybridloader.sample_seeds import parse as parse_seeding

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from torch.utils.data import Dataset, Sampler

    from hybridloader.losses import Skipped
    from hybridloader.on_error import Replace, Retry, Skip
    from hybridloader.sample_seeds import SampleSeeding


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
    on_error
        What becomes of samples that fail: ``"raise"`` raises what they raised, and their batch is lost;
        ``"skip"``, or a `Skip`, leaves them out, and batches stay full: what is left of a batch that
        came short waits for the next that does, and the last ones of a pass may be fewer and smaller.
        A `Retry` tries again first, a `Replace` puts other samples in their places. What was left out
        or replaced is in `skipped`; too much of it raises `TooManyErrors`.
    on_worker_death
        What becomes of a worker that dies (killed, crashed, ``os._exit``): ``"raise"`` raises
        `WorkerDied`; ``"restart"``, or a `RestartPolicy`, puts another in its place, with its number and
        its seed, and sends it again just what the dead one had in hand. Order and batches are as if
        nothing had happened, but for random numbers: the new worker draws from the beginning of its
        seed's. In an iterable dataset it goes on behind what had been delivered, by reading up to there.
    task_timeout
        Seconds that a worker may take for one batch; 0 is for ever. A worker that takes longer is
        reported with its Python stack: by `TaskTimeout`, or, under ``on_worker_death="restart"``, it is
        killed and replaced (a thread can't be). `timeout` is how long you wait for the next batch,
        whatever the reason; this is how long one worker may work on one.
    seeding
        What random numbers a sample draws: ``"worker"`` seeds each worker once, bit for bit as torch;
        ``"sample"``, or a `SampleSeeding` with a seed, seeds every sample, so that what it draws depends
        on the seed, the epoch and its index alone: not on backend, workers, timing or faults. In an
        iterable dataset a sample is known by its worker and its number there. See docs/randomness.md.
    shard_remainders
        What becomes of the last samples of each worker's part of an iterable dataset, where they are no
        full batch: ``"keep"`` is torch's way, a smaller batch of each worker, with ``drop_last`` none;
        ``"join"`` makes full batches of them, in the order in which the parts end, and only what is left
        of all of them is a smaller batch, or dropped.

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

    _epoch = 0
    """The one that was announced last."""

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
        on_error: str | Skip | Retry | Replace = "raise",
        on_worker_death: str | RestartPolicy = "raise",
        task_timeout: float = 0,
        seeding: str | SampleSeeding = "worker",
        shard_remainders: str = "keep",
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
        self.on_error = on_error
        self.on_worker_death = on_worker_death
        self.task_timeout = task_timeout
        self.seeding = seeding
        self.shard_remainders = shard_remainders
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

    def report(self) -> str:
        """A table of the workers of the last iterator: what each is doing, and has done.

        Empty if there is none. From any thread, so that a watchdog can ask what a stuck loop waits for.
        """
        latest = latest_of.get(self)
        iterator = None if latest is None else latest()
        return "" if iterator is None else iterator.report()

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The samples of the last pass that were left out or replaced, in the order of the batches."""
        losses = losses_of.get(self)
        return () if losses is None else tuple(losses.records)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`: for sampler, batch sampler and dataset, and for seeding.

        Without it passes are counted from 0. What was loaded is kept if it is in this epoch.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch must be a whole number, 0 or more, got {epoch!r}")
        leave_for_epoch(self, epoch)
        epochs.announce(self, epoch)
        told: list[Any] = []
        for one in (*samplers_of(self), self.dataset):
            tell = getattr(one, "set_epoch", None)
            if callable(tell) and not any(one is other for other in told):
                told.append(one)
                tell(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the pass made last has come to: behind the last batch that was yielded.

        At any time, at a cost that does not grow with the dataset. It starts no worker and draws
        nothing. See docs/resuming.md.

        Raises
        ------
        StateError
            The dataset has a state that raised or can't be pickled.
        """
        return state_of(self, stays=self._iterator is not None)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Have the next pass go on where `state_dict` was taken, on any backend.

        Parameters
        ----------
        state_dict
            What `state_dict` gave, of this loader or of one like it. ``{}`` says that there is none.

        Raises
        ------
        StateError
            A `ValueError`: it is of another kind of loader, or was cut off; the message names the
            field. What only shows by trying (a sampler that has shrunk) is raised by ``iter``, before
            any worker starts.
        """
        load(self, state_dict)

    @property
    def resuming(self) -> tuple[int, int] | None:
        """While workers read again what is behind them: samples that they have, and of how many.

        A worker counts as soon as its first batch is there. None if there is nothing to read again.
        """
        return resuming(self)

    def check_worker_number_rationality(self) -> None:
        """Warn, as torch does, when there are more worker processes than CPUs. Not for threads."""
        if self.backend is None or not get_backend(self.backend).in_process:
            super().check_worker_number_rationality()


def _check(loader: DataLoader) -> None:
    """Find what contradicts itself; also what was set after the constructor."""
    check_loader(loader)
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
    parse(loader.on_error)
    parse_seeding(loader.seeding)
    RestartPolicy.of(loader.on_worker_death)
    _check_task_timeout(loader)
    _check_remainders(loader)
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


def _check_task_timeout(loader: DataLoader) -> None:
    seconds: Any = loader.task_timeout
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not (number and seconds >= 0):  # NaN is neither
        raise ValueError(f"task_timeout is seconds, 0 or more, not {seconds!r}")
    if loader.num_workers == 0 and seconds > 0:
        raise ValueError(
            f"task_timeout={seconds} needs num_workers > 0: with 0 the caller itself makes the batch "
            "and can't be stopped"
        )


def _check_remainders(loader: DataLoader) -> None:
    remainders: Any = loader.shard_remainders
    if remainders not in ("keep", "join"):
        raise ValueError(f"shard_remainders must be 'keep' or 'join', got {remainders!r}")
    if remainders == "keep":
        return
    if loader._dataset_kind != _DatasetKind.Iterable or not loader._auto_collation:
        raise ValueError(
            "shard_remainders='join' makes batches of what is left of each worker's part of an iterable "
            "dataset; leave it out for a dataset that is asked by index, and with batch_size=None"
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
        backend = AsTorch(None if context is None else context.get_start_method())
    elif context is not None and isinstance(backend, SharedMemory):
        backend = replace(backend, start_method=context.get_start_method())
    return usable(backend)


@functools.cache
def _warn_idle(name: str) -> None:
    warnings.warn(
        f"backend={name!r} has no workers with num_workers=0: the caller does the work. "
        "Give num_workers to use it.",
        stacklevel=5,
    )
