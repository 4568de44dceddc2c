"""Sources: the order of a dataset's indices is torch's; an iterable is read as it is."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.scripts import Oops, Script, drain
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from hybridloader import Pipeline


def indices(epoch: int = 0, **parameters: Any) -> list[Any]:
    if "batch_sampler" in parameters:
        parameters["collate_fn"] = list
    return drain(Pipeline.from_dataset(**parameters).run(epoch=epoch))


class NoLength:
    def __getitem__(self, index: int) -> Any:
        return index


# -- indices -----------------------------------------------------------------------------------------


def test_a_shuffle_is_that_of_torch_with_the_epoch_added() -> None:
    for seed, run_seed, epoch in ((17, 5, 0), (17, 5, 3), (None, 40, 2)):
        wanted = (run_seed if seed is None else seed) + epoch
        theirs = list(RandomSampler(range(20), generator=torch.Generator().manual_seed(wanted)))
        pipe = Pipeline.from_dataset(range(20), shuffle=True, seed=seed)
        assert drain(pipe.run(epoch=epoch, seed=run_seed)) == theirs
    sampler: Any = DistributedSampler(range(20), num_replicas=1, rank=0, seed=17)  # type: ignore[arg-type]
    sampler.set_epoch(3)
    assert indices(3, dataset=range(20), shuffle=True, seed=17) == list(sampler)
    for seed in (None, 1):
        assert indices(dataset=[], shuffle=True, seed=seed) == []


def test_samplers_say_the_order() -> None:
    data = range(7)
    assert indices(dataset=data, sampler=[3, 1]) == [3, 1]
    sampler = BatchSampler(SequentialSampler(range(7)), 3, False)
    assert indices(dataset=data, batch_sampler=sampler) == [[0, 1, 2], [3, 4, 5], [6]]
    assert Pipeline.from_dataset(data, batch_sampler=sampler).length == 3
    assert Pipeline.from_dataset(data, sampler=[3, 1]).length == 2
    assert indices(dataset=NoLength(), sampler=[3, 1]) == [3, 1]


def test_a_sampler_is_told_the_epoch_before_every_pass() -> None:
    class Told:
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __iter__(self) -> Iterator[int]:
            return iter(self.epochs[-1:])

    told = Told()
    for epoch in (0, 1):
        assert drain(Pipeline.from_iterable(told).run(epoch=epoch)) == [epoch]
        assert indices(epoch, dataset=range(2), sampler=told) == [epoch]
    assert drain(Pipeline.from_iterable(lambda: told).run(epoch=7)) == [7]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter((1, 2))


class Unfinished(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"sampler": [1], "batch_sampler": [[1]]}, ValueError, "sampler and batch_sampler both select"),
    ({"sampler": [1], "shuffle": True}, ValueError, "shuffle=True and a sampler both set"),
    ({"seed": 3}, ValueError, "seed=3 is of no use without shuffle=True"),
    ({"shuffle": 1}, TypeError, "shuffle must be True or False, got 1"),
    ({"sampler": iter([1])}, TypeError, "an iterator, which is over after one"),
    ({"batch_sampler": iter([[1]])}, TypeError, r"give list\(batch_sampler\)"),
    ({"dataset": {1, 2}}, TypeError, "a set can't be read by index.*from_iterable"),
    ({"dataset": NoLength()}, TypeError, "a NoLength, has no __len__.*give a sampler"),
    ({"dataset": Unfinished()}, TypeError, "an? Unfinished, has no __len__"),
]


def test_what_contradicts_itself_is_refused_at_once() -> None:
    for parameters, kind, told in BAD:
        with pytest.raises(kind, match=told):
            Pipeline.from_dataset(**{"dataset": [1, 2, 3], **parameters})


# -- items -------------------------------------------------------------------------------------------


def test_an_iterable_is_read_in_every_pass() -> None:
    operator = Pipeline.from_iterable([1, None, "a"])
    for _ in range(2):
        assert drain(operator.run()) == [1, None, "a"]
    assert operator.length == 3
    assert Pipeline.from_iterable(Stream()).length is None
    assert drain(Pipeline.from_iterable(Stream()).run()) == [1, 2]
    assert drain(Pipeline.from_iterable(DataLoader([1, 2, 3], 2)).run())[0].tolist() == [1, 2]  # type: ignore[arg-type]


def test_a_function_is_called_for_every_pass() -> None:
    made: list[Script] = []

    def make() -> Script:
        made.append(Script(1, Oops(1), 2))
        return made[-1]

    pipe = Pipeline.from_iterable(make)
    assert drain(pipe.run()) == drain(pipe.run()) == [1, Oops(1), 2]
    assert len(made) == 2
    assert drain(Pipeline.from_iterable(Stream).run()) == [1, 2]  # a class is a function, too
    with pytest.raises(TypeError, match=r"the function .* must give an iterable, not 3"):
        Pipeline.from_iterable(lambda: 3).run()

    def leaks() -> Any:
        raise StopIteration

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        Pipeline.from_iterable(leaks).run()


def test_an_iterator_is_read_once() -> None:
    operator = Pipeline.from_iterable(iter([1, 2, 3]))
    first = operator.run()
    assert next(first) == 1
    with pytest.raises(
        ValueError, match=r"an iterator, which can be read once.*give a list, or a func"
    ):
        operator.run()
    assert drain(first) == [2, 3]
    assert operator.length is None
    again = pickle.loads(pickle.dumps(Pipeline.from_iterable(iter([1, 2]))))
    assert drain(again.run()) == [1, 2]


def test_a_generator_that_it_made_is_closed_and_one_that_was_given_is_not() -> None:
    ended = []

    def numbers() -> Iterator[int]:
        try:
            yield from range(30)
        finally:
            ended.append(True)

    made = []  # no collection closes them

    def make() -> Iterator[int]:
        made.append(numbers())
        return made[-1]

    class Iterable:
        def __iter__(self) -> Iterator[int]:
            return make()

    def begin_and_close(source: Any) -> Any:
        with Pipeline.from_iterable(source).prefetch(1).run() as found:
            next(found)
        return source

    for source in (make, Iterable()):
        ended.clear()
        begin_and_close(source)
        assert ended == [True]
    ended.clear()
    generator = begin_and_close(numbers())
    assert next(generator) > 0
    assert not ended
    assert begin_and_close(io.StringIO("a\n" * 30)).readline() == "a\n"


def test_a_description_tells_the_kind_of_data_and_is_the_same_in_every_run() -> None:
    for pipe, told in [
        (
            Pipeline.from_dataset([1, 2], shuffle=True, seed=3),
            "from_dataset(list of 2, shuffle=True, seed=3)",
        ),
        (Pipeline.from_iterable(range(9)), "from_iterable(range of 9)"),
        (Pipeline.from_iterable(Stream), "from_iterable(Stream)"),
        (Pipeline.from_iterable(iter([1])), "from_iterable(list_iterator)"),
    ]:
        assert pipe.operators[0].describe() == told
    pipes = (Pipeline.from_dataset(NoLength(), sampler=Stream()) for _ in range(2))
    one, other = (pipe.operators[0].describe() for pipe in pipes)
    assert one == other
    assert " at 0x" not in one


class EmptyFolder:
    """Dataset of a folder without files; its warning comes once in a process."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> int:
        raise IndexError(index)


def test_a_dataset_without_samples_warns_once() -> None:
    pipe = Pipeline.from_dataset(EmptyFolder())
    with pytest.warns(
        UserWarning, match="from_dataset: the dataset, a EmptyFolder, has no samples"
    ):
        assert list(pipe) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(pipe) == []
