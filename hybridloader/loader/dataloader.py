"""The drop-in: torch's DataLoader, run by our engine on a backend of your choice.

The constructor, the samplers, the seeds and the order of everything are torch's own, by inheritance.
What is ours is the iterator: one `Stage` on one backend. Nothing is cached between the constructor
and the iterator, because frameworks change attributes in between, and nothing but parameters is kept
under a public name, because frameworks rebuild loaders from ``vars(loader)``.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch.utils.data
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hybridloader._support.arguments import whole
from hybridloader._support.attributes import attribute
from hybridloader.engine.contract import Backend
from hybridloader.engine.registry import get_backend
from hybridloader.loader.iterator import LoaderIterator
from hybridloader.loader.options import Options
from hybridloader.loader.pass_start import leave_for_epoch, load, state_of
from hybridloader.loader.plan import LoaderPlan
from hybridloader.loader.record import announce, record_of
from hybridloader.loader.samplers import Samplers

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from torch.utils.data import Dataset, Sampler

    from hybridloader.devices.pinning import Transfer
    from hybridloader.engine.restart import RestartPolicy
    from hybridloader.fetching.on_error.error_budget import Skipped
    from hybridloader.fetching.on_error.policies import Replace, Retry, Skip
    from hybridloader.memory.accelerator import Accelerator
    from hybridloader.seeding.sample_seeds import SampleSeeding


_TORCHS = inspect.signature(torch.utils.data.DataLoader).parameters


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
    device
        Where batches are to be when ``next()`` returns: ``"cuda"``, a `torch.device`, an `Accelerator`,
        or a `Transfer`, which also says how many may wait there. A thread pins and copies them ahead;
        the stream of your thread waits for the copies, the host does not. With ``num_workers=0`` the
        caller copies them. None, or the CPU, leaves them where they are made. See
        docs/devices.md.

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

    _told_every = 0
    """Least number of a worker's results from one with the dataset's state to the next. The first
    state comes when the worker has begun, and ``iter`` waits for it. 0: as often as is cheap, and
    ``iter`` does not wait."""

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
        device: str | torch.device | Accelerator | Transfer | None = None,
    ) -> None:
        if backend is not None:
            get_backend(backend)
        if prefetch_factor == 0:
            raise ValueError(
                "prefetch_factor=0 would ask the workers for nothing; use prefetch_factor=1, or "
                "num_workers=0"
            )
        given = dict(
            locals()
        )  # a copy: under a debugger, what `locals()` gave changes with each line
        self.backend = backend
        self.threads_per_worker = threads_per_worker
        self.on_error = on_error
        self.on_worker_death = on_worker_death
        self.task_timeout = task_timeout
        self.seeding = seeding
        self.shard_remainders = shard_remainders
        self.device = device
        super().__init__(**{name: given[name] for name in given.keys() & _TORCHS.keys()})
        self._plan().check()

    def _plan(self) -> LoaderPlan:
        return LoaderPlan.of(self, self.backend, Options.of(self))

    def _get_iterator(self) -> _BaseDataLoaderIter:
        plan = self._plan()
        plan.check()
        self.check_worker_number_rationality()
        plan.warn_if_idle()
        return LoaderIterator(self, plan)

    def report(self) -> str:
        """A table of the workers of the last iterator: what each is doing, and has done.

        Empty if there is none. From any thread, so that a watchdog can ask what a stuck loop waits for.
        """
        latest = record_of(self).report
        report = None if latest is None else latest()
        return "" if report is None else report()

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The samples of the last pass that were left out or replaced, in the order of the batches."""
        budget = record_of(self).budget
        return () if budget is None else tuple(budget.records)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of `epoch`: for sampler, batch sampler and dataset, and for seeding.

        Without it passes are counted from 0. What was loaded is kept if it is in this epoch.
        """
        epoch = whole("epoch", epoch, 0)
        leave_for_epoch(self._plan(), epoch)
        announce(self, epoch)
        told: list[Any] = []
        for one in (*Samplers.of(self).chain, self.dataset):
            tell = attribute(one, "set_epoch")
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
        return state_of(self._plan(), stays=self._iterator is not None)

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
        epoch = load(self._plan(), state_dict)
        if epoch is not None:
            announce(self, epoch)

    @property
    def resuming(self) -> tuple[int, int] | None:
        """While workers read again what is behind them: samples that they have, and of how many.

        A worker counts as soon as its first batch is there. None if there is nothing to read again.
        """
        progress = record_of(self).progress
        return None if progress is None else progress.resuming

    def check_worker_number_rationality(self) -> None:
        """Warn, as torch does, when there are more worker processes than CPUs. Not for threads."""
        if self.backend is None or not get_backend(self.backend).in_process:
            super().check_worker_number_rationality()
