"""`StatefulDataLoader`, a replacement for torchdata's, with its order and states, on the engine.

It differs from `DataLoader` in two respects: ``shuffle=True`` draws as torchdata's sampler does, and
states have torchdata's form. This module does not know the contents of a state.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, IterableDataset

from hybridloader._support.text import whole
from hybridloader.loader import torchdata_form
from hybridloader.loader.dataloader import DataLoader
from hybridloader.loader.record import record_of
from hybridloader.loader.samplers import BatchOrder, RandomOrder
from hybridloader.loader.state import state_of

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    import torch
    from torch.utils.data import Dataset, Sampler
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from hybridloader.devices.pinning import Transfer
    from hybridloader.engine.contract import Backend
    from hybridloader.engine.stage import RestartPolicy
    from hybridloader.fetching.on_error import Replace, Retry, Skip
    from hybridloader.memory.accelerator import Accelerator
    from hybridloader.observe.observation import Observe
    from hybridloader.seeding.sample_rng import SampleSeeding

_OURS = inspect.signature(DataLoader).parameters


class StatefulDataLoader(DataLoader):
    """A `DataLoader` that replaces torchdata's `StatefulDataLoader`.

    Its `state_dict` has the keys and shapes of torchdata's, and `load_state_dict` takes states that
    torchdata saved. docs/frameworks/torchdata.md lists the differences.

    Parameters
    ----------
    dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, \
drop_last, timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor, \
persistent_workers, pin_memory_device, in_order
        As torchdata's, which are torch's. ``shuffle=True`` draws the order of torchdata's sampler, which
        differs from torch's.
    snapshot_every_n_steps
        Number of a worker's batches between two states of a stateful dataset. States are sent less
        often if they would take more than 2 % of the time. After a state is loaded, the batches since
        the last sent state are made again. 0 or None sends states only at the beginning and at the end
        of the worker's part. torchdata can load states taken with 1, if the dataset's `state_dict`
        takes less than 2 ms and a sampler's less than 50 us.
    backend, threads_per_worker, on_error, on_worker_death, task_timeout, seeding, shard_remainders, \
device, observe
        As `DataLoader`'s.

    Raises
    ------
    BackendUnavailable, WorkerPicklingError, ValueError
        As `DataLoader`'s.

    Examples
    --------
    >>> import torch
    >>> from hybridloader import StatefulDataLoader
    >>> data = torch.utils.data.TensorDataset(torch.arange(6))
    >>> loader = StatefulDataLoader(data, 2, num_workers=2, backend="threads")
    >>> first = next(iter(loader))
    >>> state = loader.state_dict()
    >>> state["_snapshot"]["_snapshot_step"]
    1
    >>> resumed = StatefulDataLoader(data, 2, num_workers=2, backend="threads")
    >>> resumed.load_state_dict(state)
    >>> [batch.tolist() for (batch,) in resumed]
    [[2, 3], [4, 5]]
    """

    _begun = False
    """True if `state_dict` made `_iterator`, and ``iter`` has not used it yet."""

    @property
    def _state_every(self) -> int:  # type: ignore[override]
        return self.snapshot_every_n_steps or sys.maxsize

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
        snapshot_every_n_steps: int | None = 1,
        backend: str | Backend | None = None,
        threads_per_worker: int = 1,
        on_error: str | Skip | Retry | Replace = "raise",
        on_worker_death: str | RestartPolicy = "raise",
        task_timeout: float = 0,
        seeding: str | SampleSeeding | None = None,
        shard_remainders: str = "keep",
        device: str | torch.device | Accelerator | Transfer | None = None,
        observe: bool | Observe = False,
    ) -> None:
        given = dict(locals())
        self.snapshot_every_n_steps = snapshot_every_n_steps
        if snapshot_every_n_steps is not None:
            whole("snapshot_every_n_steps", snapshot_every_n_steps, 0)
        ordered = sampler is not None or batch_sampler is not None
        if shuffle and not ordered and not isinstance(dataset, IterableDataset):
            given["sampler"], given["shuffle"] = RandomOrder(dataset, generator), None  # type: ignore[arg-type]
        super().__init__(**{name: given[name] for name in given.keys() & _OURS.keys()})
        if batch_sampler is None and type(self.batch_sampler) is BatchSampler:
            made = self.batch_sampler
            # torch's loader refuses a new one after its construction, and passing a `batch_sampler`
            # would remove its `batch_size`.
            vars(self)["batch_sampler"] = BatchOrder(made.sampler, made.batch_size, made.drop_last)

    def __iter__(self) -> _BaseDataLoaderIter:
        begun = self._drop_begun()
        if begun is None:
            return super().__iter__()
        if self.persistent_workers:
            self._iterator = begun
        return begun

    def _get_iterator(self) -> _BaseDataLoaderIter:
        given = record_of(self).given
        if isinstance(given, torchdata_form.WorkersDiffer):
            raise given
        return super()._get_iterator()

    def _drop_begun(self) -> _BaseDataLoaderIter | None:
        if not self._begun:
            return None
        self._begun = False
        begun, self._iterator = self._iterator, None
        return begun

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, as `DataLoader.set_epoch`; drop an unused first one."""
        self._drop_begun()
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the latest epoch, in torchdata's form.

        If there was no epoch, this begins the first one, as torchdata does; the next ``iter`` uses it.

        Raises
        ------
        StateError
            The dataset's `state_dict` raised, or its state can't be pickled.
        """
        record = record_of(self)
        if record.progress is None and record.loaded is None:
            self._iterator = self._get_iterator()
            self._begun = True
        plan = self._plan_ahead()
        return torchdata_form.state_of(plan, state_of(plan, stays=self._iterator is not None))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from `state_dict` at the next ``iter()``.

        Parameters
        ----------
        state_dict
            Result of `state_dict`, of this class or of torchdata's. ``{}`` means no state.

        Raises
        ------
        StateError
            A `ValueError`: the state is of another kind of loader, or was truncated; the message names
            the field. For another number of workers ``iter`` raises the error, which is then also an
            `AssertionError`, as in torchdata.
        """
        self._drop_begun()
        torchdata_form.load(self._plan_ahead(), state_dict, super().load_state_dict)
