"""`DataLoader`, a replacement for torch's: its iterator is a `Stage` on a backend that you choose.

Constructor, samplers, seeds and order are inherited from torch. Nothing is cached between the
constructor and the iterator, because frameworks change attributes in between. Only parameters have
public names, because frameworks rebuild loaders from ``vars(loader)``.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.utils.data
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import hybridloader._support.installed_torch  # noqa: F401 - it refuses a torch that is too old
from hybridloader._support.text import whole
from hybridloader._support.user_objects import Fallback, attribute
from hybridloader.engine.contract import Backend, get_backend
from hybridloader.loader.iterator import LoaderIterator
from hybridloader.loader.options import Options
from hybridloader.loader.plan import LoaderPlan, announce, record_of
from hybridloader.loader.samplers import Samplers
from hybridloader.loader.state import leave_for_epoch, load, merge_states, state_of
from hybridloader.observe.figures import LoopRecord, Recording
from hybridloader.observe.stats import stats_of

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from torch.utils.data import Dataset, Sampler

    from hybridloader.devices.pinning import Accelerator, Transfer
    from hybridloader.engine.stage import RestartPolicy
    from hybridloader.fetching.on_error import Replace, Retry, Skip, Skipped
    from hybridloader.observe.stats import Stats
    from hybridloader.seeding.sample_rng import SampleSeeding


_TORCHS = inspect.signature(torch.utils.data.DataLoader).parameters


class DataLoader(torch.utils.data.DataLoader):  # type: ignore[type-arg]  # Lightning needs the bare class
    """A `torch.utils.data.DataLoader` with a choice of workers.

    All parameters of torch's loader come first, with torch's names, order and meaning; see
    `torch.utils.data.DataLoader`. Batches are the same, bit for bit, wherever torch's are
    deterministic.

    Parameters
    ----------
    dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory
        As torch's. ``num_workers="auto"`` measures for at most 5 seconds before the first batch and
        keeps its choice (docs/tuning.md). Batches and ``seeding="sample"`` do not depend on it.
    drop_last, timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor
        As torch's. `timeout` is in seconds.
    persistent_workers, pin_memory_device, in_order
        As torch's.
    backend
        Kind of the workers: a name, or a `Backend` with options, such as
        ``SharedMemory(start_method="forkserver")``. Names: ``"inline"``, ``"threads"``, ``"fork"``,
        ``"spawn"``, ``"shared-memory"`` or ``"processes"``, ``"ray"``, those of extensions; case does
        not matter, and ``_`` equals ``-``. None starts processes as torch does on this platform, by
        `multiprocessing_context`; their batches return through shared memory. With
        ``num_workers=0`` the calling thread does the work on any backend. ``"auto"`` chooses as
        ``num_workers="auto"`` does.
    threads_per_worker
        Number of threads in each worker that fetch the samples of a batch at the same time. For
        samples that wait: a batch of 256 samples of 20 ms each takes 0.33 s with 16 threads, and 5 s
        with one. With ``num_workers=0`` the calling thread has them. The dataset must be safe to
        read from several threads. They share the worker's random generators, including
        `get_worker_info().rng`, so the random numbers of a sample depend on timing. A dataset with
        `__getitems__` is still asked for a whole batch.
    on_error
        Policy for samples that fail. ``"raise"`` raises their error, and the batch is lost.
        ``"skip"``, or a `Skip`, leaves them out, so their batch is smaller; a batch without a good
        sample is left out. A `Retry` tries again first, a `Replace` substitutes other samples, and
        keeps batches full. `skipped` lists them; `TooManyErrors` is raised if there are too many.
    on_worker_death
        Policy for a worker that dies (killed, crashed, ``os._exit``). ``"raise"`` raises
        `WorkerDied`. ``"restart"``, or a `RestartPolicy`, restarts it with the same number and
        seed, and sends its unfinished tasks again. Order and batches stay the same. Random numbers
        may change, because the generators start from the seed. A reader of an iterable dataset
        reads its shard again, and drops the delivered samples.
    task_timeout
        Seconds that a worker may take for one batch; 0 sets no limit. `TaskTimeout` reports a worker
        that takes longer, with its Python stack. Under ``on_worker_death="restart"`` the worker is
        killed and restarted instead (a thread can't be). `timeout`, in contrast, limits how long you
        wait for the next batch.
    seeding
        Seeding of the random numbers that samples draw. None is ``"worker"`` in processes, and the
        numbers of ``"sample"`` on threads. ``"worker"`` seeds each worker once, bit for bit as
        torch. ``"sample"``, or a `SampleSeeding` with a seed, seeds every sample: its random numbers
        depend on the seed, the epoch and its index, not on backend, workers, timing or faults. A
        sample of an iterable dataset is identified by its worker and its number there. ``"shared"``
        lets samples on threads draw from the generators of your loop. See docs/randomness.md.
    device
        Device on which ``next()`` returns batches: ``"cuda"``, a `torch.device`, an `Accelerator`,
        or a `Transfer`, which also limits how many may wait there. A thread pins and copies them
        before your loop asks; your thread's stream waits for the copies, the host does not. With
        ``num_workers=0`` the calling thread copies them. None, or the CPU, copies nothing. See
        docs/devices.md.
    observe
        True measures each epoch for `stats`: the time of your loop and of the workers, and the
        bottleneck. It costs 2 to 3 % of batches that take 10 to 20 microseconds, and less of longer
        ones. See docs/why-is-it-slow.md.

    Raises
    ------
    BackendUnavailable
        A `ValueError`: there is no such backend (the message lists the existing ones), or, when the
        iterator is made, it can't work in this process.
    WorkerPicklingError
        A `TypeError` of ``iter``: an object for a process can't be pickled. It names the attribute.
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
    """Epoch passed to the last `set_epoch`."""

    _auto: Auto | None = None
    """Parameters to be chosen when the first epoch begins."""

    _checked: tuple[Any, ...] = ()
    """`LoaderPlan.given` of the last epoch: the same objects are not checked again."""

    _tuning: Any = None
    """`Tuning` that chose them."""

    _state_every = 0
    """Least number of a worker's results from one with the dataset's state to the next; ``iter`` waits
    for the first state, which a worker sends when it has begun. 0: as often as is cheap, and ``iter``
    does not wait."""

    # ``DataLoader[int]`` works as with torch's, although this class is not generic: see its base.
    __class_getitem__ = classmethod(types.GenericAlias)  # type: ignore[var-annotated]

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | str = 0,
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
        seeding: str | SampleSeeding | None = None,
        device: str | torch.device | Accelerator | Transfer | None = None,
        observe: bool = False,
    ) -> None:
        auto = Auto.of(dataset, num_workers, backend, multiprocessing_context)
        if auto is not None:  # until they are chosen, one worker: 0 would not allow all options
            num_workers = 1 if auto.workers else num_workers
            backend = None if auto.backend else backend
        if prefetch_factor == 0:
            raise ValueError(
                "prefetch_factor=0 would leave the workers without tasks; use prefetch_factor=1, or "
                "num_workers=0"
            )
        given = dict(locals())  # a copy: under a debugger, the result of `locals()` changes
        self.backend = backend
        self.threads_per_worker = threads_per_worker
        self.on_error = on_error
        self.on_worker_death = on_worker_death
        self.task_timeout = task_timeout
        self.seeding = seeding
        self.device = device
        self._prefetch_chosen = prefetch_factor is not None
        self.observe = observe
        super().__init__(**{name: given[name] for name in given.keys() & _TORCHS.keys()})
        if auto is not None:
            self._auto = auto
        self._plan().check()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "backend" and value is not None:
            get_backend(value)
        super().__setattr__(name, value)

    def _plan(self) -> LoaderPlan:
        return LoaderPlan.of(self, self.backend, Options.of(self))

    def _plan_ahead(self) -> LoaderPlan:
        """Return the plan of the next epoch; persistent workers keep their number."""
        plan, latest = self._plan(), record_of(self).progress
        if self._iterator is None or latest is None or latest.workers == plan.num_workers:
            return plan
        return replace(plan, num_workers=latest.workers)

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self._auto is not None:
            # The measurement may iterate over another loader.
            auto, self._auto = self._auto, None
            try:
                # A layer above loaders, so it is found by its name, as backends are.
                chooser: Any = importlib.import_module("hybridloader.tuning.tune")
                self._tuning = chooser.choose(self, auto)
            except BaseException:
                self._auto = auto
                raise
        plan = self._plan()
        if [*map(id, plan.given)] != [*map(id, self._checked)]:
            plan.check()
            plan.warn()
            self.check_worker_number_rationality()
            self._checked = plan.given
        return LoaderIterator(self, plan)

    def report(self) -> str:
        """Return a table of the last iterator's workers: current task, and work done.

        An empty text if there is no iterator. May be called from any thread, so that a watchdog can
        see where a loop hangs.
        """
        latest = record_of(self).report
        report = None if latest is None else latest()
        return "" if report is None else report()

    def stats(self) -> Stats:
        """Return the statistics of the last iterator's latest epoch, with the bottleneck.

        May be called from any thread, also after the iterator was closed or deleted. Empty before the
        first epoch.

        Raises
        ------
        RuntimeError
            The loader, or the last iterator, was not made with ``observe=True``.
        """
        observation = record_of(self).observation
        if observation is not None:
            return observation.stats()
        if not self.observe or record_of(self).report is not None:
            raise RuntimeError(
                "stats() needs a loader that observes: DataLoader(..., observe=True), before iter()"
            )
        return stats_of(Recording((), LoopRecord(0.0, 0.0)))  # it was never iterated

    @Fallback
    def skipped(self) -> tuple[Skipped, ...]:
        """Samples of the latest epoch that were skipped or replaced, in the order of the batches."""
        budget = record_of(self).budget
        return () if budget is None else tuple(budget.records)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, for sampler, batch sampler, dataset and seeding.

        Without it, epochs are counted from 0. A loaded state is kept if it is of this epoch.
        """
        epoch = whole("epoch", epoch, 0)
        leave_for_epoch(self._plan_ahead(), epoch)
        announce(self, epoch)
        # By identity, each of them once.
        for one in {id(one): one for one in (*Samplers.of(self).chain, self.dataset)}.values():
            if callable(set_epoch := attribute(one, "set_epoch")):
                set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the latest epoch, after the last batch that was yielded.

        May be called at any time (mid-epoch). The cost does not grow with the dataset. Starts no worker
        and draws no random number. See docs/resuming.md.

        Raises
        ------
        StateError
            The dataset's `state_dict` raised, or its state can't be pickled.
        """
        return state_of(self._plan_ahead(), stays=self._iterator is not None)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from `state_dict` at the next ``iter()``, on any backend.

        Parameters
        ----------
        state_dict
            The result of `state_dict`, of this loader or of one like it. ``{}`` means no state.

        Raises
        ------
        StateError
            A `ValueError`: the state is of another kind of loader, or was truncated; the message
            names the field. Errors that appear only when it is used (a sampler that has shrunk) are
            raised by ``iter``, before any worker starts.
        """
        epoch = load(self._plan_ahead(), state_dict)
        if epoch is not None:
            announce(self, epoch)

    @Fallback
    def tuning(self) -> Any:
        """`Tuning` that chose for ``"auto"``; None before the first epoch, or without ``"auto"``."""
        return self._tuning

    @staticmethod
    def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return one state of those of all ranks, from which any number of ranks resumes.

        The dataset is iterable and names its shards, by `shard_names` and `read_shard`. The shards that
        are left are divided again: together, the ranks that load the state return each sample that was
        not returned yet, and none twice. See docs/resuming.md.

        Parameters
        ----------
        states
            State of each rank, in any order. The ranks may be at different positions in one epoch.

        Returns
        -------
        dict
            A state for `load_state_dict`, the same for all ranks.

        Raises
        ------
        StateError
            A state is missing, is of another epoch or dataset, or has no shards. Or the position of a
            worker in its shard is not known, as after a batch that raised.
        """
        return merge_states(states)

    @Fallback
    def resuming(self) -> tuple[int, int] | None:
        """Number of samples that workers have read again after a resume, and the number to read.

        A worker counts as soon as its first batch has arrived. None if there is nothing to read again.
        """
        progress = record_of(self).progress
        return None if progress is None else progress.resuming

    def check_worker_number_rationality(self) -> None:
        """Warn, as torch does, of more worker processes than CPUs. Threads are not counted."""
        if self.backend is None or not get_backend(self.backend).in_process:
            super().check_worker_number_rationality()


# -- ``num_workers="auto"`` and ``backend="auto"``: a choice that is left open until the first epoch

AUTO = "auto"


class Auto(NamedTuple):
    """Parameters of a loader that are chosen by measurement."""

    workers: bool
    backend: bool

    @classmethod
    def of(cls, dataset: Any, num_workers: Any, backend: Any, context: Any) -> Auto | None:
        """Return the parameters that are ``"auto"``; None if none is. Raises `ValueError`."""
        auto = cls(num_workers == AUTO, isinstance(backend, str) and backend.lower() == AUTO)
        if not any(auto):
            return None
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                "num_workers='auto' and backend='auto' are for map-style datasets: the batches of an "
                "iterable dataset depend on the number of workers. Call hybridloader.tune(loader), and "
                "pass the numbers that it prints"
            )
        if auto.backend and context is not None:
            raise ValueError("backend='auto' contradicts multiprocessing_context; omit one of them")
        if auto.backend and not auto.workers and not num_workers:
            raise ValueError(
                "backend='auto' has no choice with num_workers=0; pass num_workers='auto', or a number"
            )
        return auto
