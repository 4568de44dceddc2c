"""Pipelines: steps that you compose, each with its own workers.

A `Pipeline` is a description. It holds no thread, no process and no position; it can be pickled,
extended in several ways and iterated any number of times, also at the same time.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from hybridloader._support.states import is_stateful
from hybridloader._support.text import flag, keywords, whole
from hybridloader.devices.pinning import AHEAD, BUFFER_BYTES
from hybridloader.fetching.collate import WithoutTorch
from hybridloader.fetching.readers import MapFetch
from hybridloader.fetching.shards import names_shards
from hybridloader.pipeline.batches import Batch, BatchBy, BucketBy
from hybridloader.pipeline.cache import Cache, fingerprint_of_steps, ranks_of_steps
from hybridloader.pipeline.joins import Concat, Interleave, Mix, Zip
from hybridloader.pipeline.order import (
    Enumerate,
    Repeat,
    ShardByRank,
    Shuffle,
    SkipFirst,
    Take,
)
from hybridloader.pipeline.pack import Pack
from hybridloader.pipeline.sources import (
    Filter,
    FlatMap,
    Indices,
    Items,
    Lookup,
    Map,
    PinMemory,
    Prefetch,
    Readers,
    ToDevice,
)
from hybridloader.running.operator import (
    INFINITE,
    Chain,
    Length,
    Operator,
    Placement,
    Source,
    Where,
    in_keywords,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hybridloader.running.run import Epochs, Run


_P = ParamSpec("_P")


def _step(name: str, kind: Callable[_P, Operator]) -> Callable[Concatenate[Pipeline, _P], Pipeline]:
    """Make the method that adds an operator of `kind`."""

    def method(self: Pipeline, /, *args: _P.args, **kwargs: _P.kwargs) -> Pipeline:
        keywords(f"Pipeline.{name}", kwargs, known)
        return self._then(kind(*args, **kwargs))

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = inspect.signature(kind).parameters
    parameters = known.values()
    method.__name__, method.__qualname__, method.__doc__ = name, f"Pipeline.{name}", kind.__doc__
    method.__signature__ = inspect.Signature([own, *parameters], return_annotation="Pipeline")  # type: ignore[attr-defined]
    return method


class Pipeline(Chain):
    """Steps from a source to your loop, each with its own backend.

    `from_dataset` and `from_iterable` make one. Every method returns a new pipeline and does not change
    this one. Iterating runs it.

    Parameters
    ----------
    operators
        The steps, a `Source` first.

    Examples
    --------
    >>> from hybridloader import Pipeline
    >>> pipe = Pipeline.from_dataset(range(6)).map(lambda x: x * x, backend="threads", num_workers=2)
    >>> list(pipe.batch(3, collate_fn=list))
    [[0, 1, 4], [9, 16, 25]]
    """

    __slots__ = ("_epoch",)

    _epoch: Iterator[int]

    def __init__(self, operators: Sequence[Operator]) -> None:
        if not operators or not isinstance(operators[0], Source):
            raise TypeError("a pipeline begins with a source; see Pipeline.from_dataset")
        for operator in operators[1:]:
            if not isinstance(operator, Operator) or isinstance(operator, Source):
                raise TypeError(f"{operator!r} can't be a step of a pipeline: it is no Operator")
        object.__setattr__(self, "operators", tuple(operators))
        object.__setattr__(self, "_epoch", itertools.count())

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Pipeline can't be changed; its methods make new ones ({name!r})")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Pipeline can't be changed; its methods make new ones ({name!r})")

    def __reduce__(self) -> Any:
        return Pipeline, (self.operators,)

    # -- sources -------------------------------------------------------------------------------------

    @classmethod
    @in_keywords
    def from_dataset(
        cls,
        dataset: Any,
        *,
        sampler: Any = None,
        batch_sampler: Any = None,
        shuffle: bool = False,
        seed: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        name: str | None = None,
        **where: Unpack[Where],
    ) -> Pipeline:
        """Samples of a map-style dataset: an object with ``len()`` and ``[]``.

        Parameters
        ----------
        dataset
            Its samples are fetched by index, on the stage's backend if one is given.
        sampler
            An iterable of indices, such as torch's samplers. Its `set_epoch`, if it has one, is called
            with the number of the epoch before every epoch, including the first: do not call it
            yourself.
        batch_sampler
            An iterable of lists of indices; each list makes one batch, as in torch's DataLoader.
            `set_epoch` as above.
        shuffle
            Draw the order as torch's `RandomSampler` does.
        seed
            Seed of the order; the epoch is added to it, as in torch's `DistributedSampler`. None: the
            seed of the run, if it has one, otherwise drawn from torch's default generator, as torch's
            loader does.
        collate_fn
            Function that makes a batch of a list of samples, with `batch_sampler` only; None uses
            torch's `default_collate`.
        name
            Name of this stage in errors and tables.
        **where
            Backend, workers and options; `hybridloader.pipeline.Placement` describes them.

        Raises
        ------
        TypeError, ValueError
            Parameters contradict each other.
        """
        own = ("sampler", "batch_sampler", "shuffle", "seed", "collate_fn", "name")
        keywords(f"stage {name or 'from_dataset'!r}", where, Where.__annotations__, own)
        indices = Indices(dataset, sampler, batch_sampler, shuffle, seed)
        if collate_fn is not None and batch_sampler is None:
            raise ValueError(
                "collate_fn makes batches of what a batch_sampler asks for; without one use "
                ".batch(size, collate_fn=...)"
            )
        if batch_sampler is None:
            fetch = MapFetch(dataset, _as_it_is, batched=False)
        else:
            fetch = MapFetch(dataset, collate_fn or WithoutTorch("default_collate"), batched=True)
        return cls([indices, Lookup.of(fetch, name, where)])

    @classmethod
    @in_keywords
    def from_iterable(
        cls, items: Any, *, name: str | None = None, **where: Unpack[Where]
    ) -> Pipeline:
        """Items of an iterable, each once.

        Parameters
        ----------
        items
            An iterable; a function that returns one, called for each epoch; or an iterator, such as a
            generator, for a single epoch. Its `set_epoch` is called as for `from_dataset`. One reader
            reads it, on any later stages. With `backend` and `num_workers` there are several readers,
            each with its own copy of the iterable or its own call of the function. They learn their
            shard from `get_worker_info()`. An iterable with `shard_names` and `read_shard` is read
            through these two: its shards are divided among ranks and readers (docs/resuming.md).
        name
            Name of this stage in errors and tables.
        **where
            Backend, workers and options; `hybridloader.pipeline.Placement` describes them.
        """
        given = {key for key, value in where.items() if value is not None}
        if given or (names_shards(items) and not is_stateful(items)):
            readers = Readers(items, label=name)
            if given <= {"on_error", "seeding"}:
                # A reader distinguishes a failed item from the end.
                where["backend"], where["num_workers"] = "inline", 1
            return cls([Readers(items, Placement.of(readers.name, where), name)])
        return cls([Items(items)])

    # -- steps: most methods are made of an operator, and have its parameters and its description
    #
    # Nothing is checked here that an operator checks itself, and nothing runs.

    def _then(self, operator: Operator) -> Pipeline:
        return Pipeline((*self.operators, operator))

    # -- work ----------------------------------------------------------------------------------------

    @in_keywords
    def map(
        self, function: Callable[[Any], Any], *, name: str | None = None, **where: Unpack[Where]
    ) -> Pipeline:
        """`function` of each item.

        Parameters
        ----------
        function
            Function of one item. An object with a method `setup()` is copied for every worker, which
            calls `setup` once, before the first item. If it is an ``async def``, each worker runs
            `concurrency` coroutines at a time, and their results are the items.
        name
            Name of this stage in errors and tables.
        **where
            Backend, workers and options of the step; `hybridloader.pipeline.Placement` describes them.
        """
        return self._then(Map.of(function, name, where))

    @in_keywords
    def flat_map(
        self, function: Callable[[Any], Any], *, name: str | None = None, **where: Unpack[Where]
    ) -> Pipeline:
        """The items of the iterables that `function` returns. See `map`."""
        return self._then(FlatMap.of(function, name, where))

    @in_keywords
    def filter(
        self, function: Callable[[Any], Any], *, name: str | None = None, **where: Unpack[Where]
    ) -> Pipeline:
        """The items for which `function` is true. See `map`."""
        return self._then(Filter.of(function, name, where))

    # -- groups --------------------------------------------------------------------------------------

    batch = _step("batch", Batch)
    batch_by = _step("batch_by", BatchBy)
    bucket_by = _step("bucket_by", BucketBy)
    pack = _step("pack", Pack)

    # -- order ---------------------------------------------------------------------------------------

    shuffle = _step("shuffle", Shuffle)
    take = _step("take", Take)
    skip = _step("skip", SkipFirst)
    enumerate = _step("enumerate", Enumerate)
    repeat = _step("repeat", Repeat)
    shard = _step("shard", ShardByRank)
    prefetch = _step("prefetch", Prefetch)

    def cache(self, path: Any = None, *, fingerprint: str | None = None) -> Pipeline:
        """Keep the items of the first complete epoch, in memory or in a file; see `Cache`.

        Parameters
        ----------
        path
            Path of the file.
        fingerprint
            Your description of the contents; a file with another description is refused. None describes
            the steps before this one: their names, and the reprs of their arguments and of the data.
        """
        if fingerprint is None:
            fingerprint = "" if path is None else fingerprint_of_steps(self)
        ranks = None if path is None else partial(ranks_of_steps, self)
        return self._then(Cache(path, fingerprint=fingerprint, ranks=ranks))

    # -- several pipelines ---------------------------------------------------------------------------

    # The operator comes first: it refuses what is no pipeline, `self` too, as in ``Pipeline.zip(3, b)``.

    def zip(self, *others: Pipeline, strict: bool = True) -> Pipeline:
        """Tuples of one item from each; also as ``Pipeline.zip(a, b)``."""
        return Pipeline([Zip((self, *others), strict)])

    def concat(self, *others: Pipeline) -> Pipeline:
        """All items of this pipeline, then all of the next one."""
        return Pipeline([Concat((self, *others))])

    def mix(
        self,
        *others: Pipeline,
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        stop: str = "all",
    ) -> Pipeline:
        """Items of several pipelines, drawn by weight; see `Mix`."""
        return Pipeline([Mix((self, *others), weights, seed, stop)])

    def interleave(self, *others: Pipeline) -> Pipeline:
        """One item of each in turn, until all have ended."""
        return Pipeline([Interleave((self, *others))])

    # -- the end -------------------------------------------------------------------------------------

    pin_memory = _step("pin_memory", PinMemory)

    def to(
        self, device: Any, *, batches_ahead: int = AHEAD, buffer_bytes: int = BUFFER_BYTES
    ) -> Pipeline:
        """Batches on a device, to which a thread copies them before your loop asks; see `ToDevice`.

        ``"cpu"`` changes nothing.
        """
        step = ToDevice(device, batches_ahead=batches_ahead, buffer_bytes=buffer_bytes)
        return self if str(device).partition(":")[0] == "cpu" else self._then(step)

    def apply(self, step: Operator | Callable[[Pipeline], Pipeline]) -> Pipeline:
        """Add your operator, or return the pipeline that a function makes of this one."""
        if isinstance(step, Operator):
            return self._then(step)
        if not callable(step) or isinstance(step, type):
            raise TypeError(f"apply takes an Operator or a function of a Pipeline, not {step!r}")
        made = step(self)
        if not isinstance(made, Pipeline):
            raise TypeError(f"apply: {step!r} returned {made!r}, which is not a Pipeline")
        return made

    # -- running -------------------------------------------------------------------------------------

    def __iter__(self) -> Run:
        """Run the pipeline. The first iteration of this object is epoch 0, the next is epoch 1."""
        return self.run(epoch=next(self._epoch))

    def run(
        self,
        *,
        epoch: int | None = None,
        seed: int | None = None,
        state: Mapping[str, Any] | None = None,
        observe: bool = False,
    ) -> Run:
        """Run one epoch.

        Parameters
        ----------
        epoch
            Number of the epoch, for all random draws. None: that of `state`, otherwise 0.
        seed
            Seed of the workers, and of all random steps without a seed. None: drawn from torch's
            default generator, so that ``torch.manual_seed`` decides it (or, while torch is not
            imported, from `random`).
        state
            State from `Run.state_dict` of a run of an equal pipeline: resume after the items that it
            returned. Backends and other options of placement and speed may differ.
        observe
            True measures the run for `Run.stats`: the time of your loop and of each step, and the
            bottleneck. See docs/why-is-it-slow.md.

        Returns
        -------
        Run
            An iterator, and a context manager that closes it.

        Raises
        ------
        BackendUnavailable, WorkerPicklingError, ValueError
            The pipeline can't run; no worker was started, or none is left.
        StateError
            The pipeline can't resume from `state`.
        """
        from hybridloader.running.run import Run, executor_of
        from hybridloader.running.state import checked

        epoch = None if epoch is None else whole("epoch", epoch, 0)
        seed = None if seed is None else whole("seed", seed)
        flag("observe", observe)
        if state is None:
            executor = executor_of(self, seed, observe=observe, first=epoch or 0)
            return Run(executor, epoch or 0)
        resumed = checked(state, self, epoch=epoch, seed=seed)
        executor = executor_of(self, None, resumed, observe=observe, idle=resumed.finished)
        return Run(executor, resumed.epoch, None, resumed)

    def epochs(
        self,
        count: int | None = None,
        *,
        first: int = 0,
        seed: int | None = None,
        state: Mapping[str, Any] | None = None,
        observe: bool = False,
    ) -> Epochs:
        """Run several epochs on the same workers: ``for epoch in pipe.epochs(3): for batch in epoch:``.

        Parameters
        ----------
        count
            Number of epochs; None: endless.
        first
            Number of the first epoch.
        seed
            Seed as for `run`; one for all epochs.
        state
            State as for `run`. The first epoch is the state's, or the next one if the state is at the
            end of an epoch. Earlier epochs count among `count`.
        observe
            See `run`.
        """
        from hybridloader.running.run import Epochs, PipelineLoader

        count = None if count is None else whole("count", count, 0)
        first = whole("first", first, 0)
        loader = PipelineLoader(self, seed=seed, observe=observe)
        return Epochs(loader, count, first, state)

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Merge the states of all ranks into one state, from which any number of ranks resumes.

        The ranks share the indices of a `DistributedShuffleSampler` or `BlockShuffleSampler`, or the
        shards that the dataset of `from_iterable` names. The rest is shared again: together, the ranks
        that load the state return every item that was not returned yet, and none twice. The order of
        these items differs. Steps with a buffer start with an empty buffer, so batches may have other
        items. With named shards, the state of one rank alone may be merged for other readers. See
        docs/resuming.md.

        Parameters
        ----------
        states
            State of each rank, in any order, of a run or a loader of such a pipeline. They must be of
            one epoch; the ranks may be at different positions of it.

        Returns
        -------
        dict
            A state for `run`, `epochs` and `PipelineLoader`, the same for all ranks.

        Raises
        ------
        StateError
            A state is missing or of another pipeline. Or a step depends on the numbers of its items, as
            `take`, `enumerate` and joins do. Or a rank stopped within the items that a step makes of
            one item, and earlier steps had joined or shuffled items.

        Examples
        --------
        >>> from hybridloader import Pipeline
        >>> from hybridloader.sampling import DistributedShuffleSampler
        >>> def make(rank, ranks):
        ...     sampler = DistributedShuffleSampler(
        ...         12, seed=0, num_replicas=ranks, rank=rank, uneven="exact"
        ...     )
        ...     return Pipeline.from_dataset(range(12), sampler=sampler).filter(lambda x: x % 3 != 0)
        >>> had, states = [], []
        >>> for rank, items in enumerate((3, 1)):
        ...     run = make(rank, 2).run(seed=1)
        ...     had += [next(run) for _ in range(items)]
        ...     states.append(run.state_dict())
        >>> state = make(0, 3).merge_states(states)
        >>> rest = [item for rank in range(3) for item in make(rank, 3).run(state=state)]
        >>> sorted(had + rest)
        [1, 2, 4, 5, 7, 8, 10, 11]
        """
        from hybridloader.running.merging import merged

        return merged(self, states)

    # -- what it is ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        length = self.length
        if length is None or length == INFINITE:
            known: Length = None
            for operator in self.operators:
                known = operator.length(known)
                if known == length:
                    break
            unknown = "returns a number of items that is not known before it has run"
            why = "never ends" if length == INFINITE else unknown
            raise TypeError(f"this pipeline has no len(): {operator.name!r} {why}")
        return math.floor(length)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Pipeline {' -> '.join(operator.describe() for operator in self.operators)}>"

    def __str__(self) -> str:
        from hybridloader.running.plan import as_table

        return as_table(self)


def _as_it_is(sample: Any) -> Any:
    return sample
