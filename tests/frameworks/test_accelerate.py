"""accelerate rebuilds every loader: under `keep_loaders` ours stay ours, with their data and state."""

from __future__ import annotations

import copy
import gc
import importlib.util
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.seeded_training import (
    LIKE_TORCHS_PROCESSES,
    WORKERS,
    Augmented,
    Regression,
    losses,
    torch_loader,
)
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, get_worker_info

from hybridloader import DataLoader, SampleSeeding, Skip, StatefulDataLoader, Threads

pytest.importorskip("accelerate")
from accelerate import data_loader as accelerates
from accelerate import skip_first_batches
from support.accelerate_loaders import BATCH, BATCHES, accelerator, flat, kept_loaders, numbers

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated",  # torchdata's StatefulDataLoader calls it
)

OWN = {
    "backend": Threads(copy_dataset=True),
    "threads_per_worker": 2,
    "on_error": Skip(max_failures=3),
    "on_worker_death": "raise",
    "task_timeout": 30.0,
    "seeding": SampleSeeding(3),
    "observe": True,
}


class Counted(IterableDataset[int]):
    """Samples 0 to 19; each worker reads its part."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, BATCH * BATCHES, step))


@pytest.fixture
def kept() -> Iterator[Any]:
    with kept_loaders():
        yield


# -- what is kept ----------------------------------------------------------------------------------


def test_without_the_call_accelerate_makes_a_loader_of_torchs() -> None:
    prepared = accelerator().prepare(numbers())
    assert type(prepared.base_dataloader) is TorchLoader


def made(how: str, loader: Any) -> Any:
    """`loader` as accelerate hands it out."""
    if how.startswith("unprepared"):
        return skip_first_batches(loader, 2)
    prepared = accelerator(dispatch_batches=how.startswith("dispatch")).prepare(loader)
    return skip_first_batches(prepared, 2) if how.endswith("skip") else prepared


every_way = pytest.mark.parametrize(
    ("how", "skipped"),
    [
        ("prepare", 0),
        ("dispatch", 0),
        ("prepare, skip", 2),
        ("dispatch, skip", 2),
        ("unprepared, skip", 2),
    ],
)


@pytest.mark.usefixtures("kept")
def test_a_state_that_was_loaded_before_is_not_taken_along_and_a_warning_says_so() -> None:
    loader = numbers()
    loader.load_state_dict(loader.state_dict())
    with pytest.warns(
        UserWarning, match=r"has loaded a state.*the result of accelerator.prepare\(\)"
    ):
        accelerator().prepare(loader)


@pytest.mark.usefixtures("kept")
def test_where_a_prefetch_factor_was_left_out_it_is_left_out_again() -> None:
    data: Any = range(BATCH * BATCHES)
    for chosen in (None, 2):
        loader = DataLoader(data, BATCH, num_workers=WORKERS, prefetch_factor=chosen)
        assert accelerator().prepare(loader)._prefetch_chosen is (chosen is not None)


@pytest.mark.usefixtures("kept")
@every_way
def test_class_backend_and_every_option_are_kept_and_an_iterable_dataset(
    how: str, skipped: int
) -> None:
    data: Any = range(BATCH * BATCHES)
    ours, torchs = (inspect.signature(kind).parameters for kind in (DataLoader, TorchLoader))
    assert OWN.keys() | {"device"} >= ours.keys() - torchs.keys(), "a new one"
    loader = DataLoader(data, BATCH, num_workers=WORKERS, **OWN)
    prepared = made(how, loader)
    base = getattr(prepared, "base_dataloader", prepared)
    assert isinstance(prepared, DataLoader)
    assert type(base) is DataLoader
    assert base is not loader
    for name, value in OWN.items():
        assert getattr(prepared, name) is value, name
    assert (prepared.num_workers, prepared.prefetch_factor) == (WORKERS, loader.prefetch_factor)
    assert flat(prepared) == list(data)[skipped * BATCH :]

    def counted() -> DataLoader:
        return DataLoader(Counted(), 3, num_workers=WORKERS, backend="threads")

    whole = [batch.tolist() for batch in counted()]
    prepared = made(how, counted())
    base = prepared.base_dataloader
    assert (type(base), base.backend) == (DataLoader, "threads")
    assert [batch.tolist() for batch in prepared] == whole[skipped:]


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("dispatch", [False, True])
def test_loaders_of_torchs_are_rebuilt_as_ever(stateful: bool, dispatch: bool) -> None:
    if stateful:
        pytest.importorskip("torchdata")
    prepared = accelerator(use_stateful_dataloader=stateful, dispatch_batches=dispatch).prepare(
        TorchLoader(torch.arange(8), 4)  # type: ignore[arg-type]
    )
    kind = type(prepared.base_dataloader)
    assert kind.__name__ == ("StatefulDataLoader" if stateful else "DataLoader")
    assert kind.__module__.startswith("torchdata." if stateful else "torch.")
    skipping = skip_first_batches(prepared, 1)
    assert type(skipping.base_dataloader) is TorchLoader
    assert [flat(prepared), flat(skipping)] == [list(range(8)), list(range(4, 8))]


@pytest.mark.usefixtures("kept")
def test_a_prepared_loader_is_prepared_again_pickled_and_copied() -> None:
    prepared = accelerator().prepare(numbers(on_error="skip"))
    for other in (
        accelerates.prepare_data_loader(prepared),
        pickle.loads(pickle.dumps(prepared)),
        copy.copy(prepared),
    ):
        assert (other.backend, other.on_error) == ("threads", "skip")
        assert flat(other) == list(range(20))


@pytest.mark.usefixtures("kept")
def test_subclasses_and_our_stateful_loader_become_plain_loaders_of_ours() -> None:
    """Backend and options stay, although accelerate does not know the constructor."""

    class Named(DataLoader):
        def __init__(self, name: str) -> None:
            super().__init__(range(20), 4, num_workers=1, backend="inline")  # type: ignore[arg-type]

    rows: list[tuple[Any, dict[str, Any]]] = [(Named("train"), {})]
    if importlib.util.find_spec("torchdata"):  # accelerate asks for it
        stateful = StatefulDataLoader(list(range(20)), BATCH, backend="inline")  # type: ignore[arg-type]
        rows.append((stateful, {"use_stateful_dataloader": True}))
    for loader, options in rows:
        prepared = accelerator(**options).prepare(loader)
        assert type(prepared.base_dataloader) is DataLoader
        assert prepared.backend == "inline"
        assert flat(prepared) == list(range(20))


# -- the same data ---------------------------------------------------------------------------------


def run(kind: Any, data: Any, epochs: int = 2, **options: Any) -> list[float]:
    """The losses of a loop as accelerate's users write it."""
    torch.manual_seed(5)
    regression = Regression()
    helper = accelerator(use_seedable_sampler=options.pop("seedable", False))
    model, optimizer, loader = helper.prepare(
        regression.model,
        regression.optimizer,
        kind(data, BATCH, shuffle=True, num_workers=WORKERS, **options),
    )

    def step(batch: Any) -> float:
        features, target = batch
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(features).squeeze(1), target)
        helper.backward(loss)
        optimizer.step()
        return loss.item()

    return losses(loader, epochs, step)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("seedable", [False, True])
def test_losses_equal_those_of_torchs_loader(seedable: bool) -> None:
    """On threads where samples draw nothing."""
    wanted = run(torch_loader, Augmented(), seedable=seedable)
    for backend in LIKE_TORCHS_PROCESSES:
        assert run(DataLoader, Augmented(), seedable=seedable, backend=backend) == wanted
    data = Augmented(noise=0)
    assert run(DataLoader, data, backend="threads") == run(torch_loader, data)


# -- epochs ----------------------------------------------------------------------------------------


def drawn(loader: Any) -> list[float]:
    return [float(value) for features, _ in loader for value in features[:, 0]]


def noisy(**options: Any) -> DataLoader:
    return DataLoader(
        Augmented(),
        BATCH,
        num_workers=WORKERS,
        backend="threads",
        seeding=SampleSeeding(1),
        **options,
    )


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("dispatch", [False, True])
def test_samples_draw_by_accelerates_epoch_also_behind_a_skip(dispatch: bool) -> None:
    plain = noisy()
    whole = [drawn(plain) for _ in range(4)]
    assert whole[0] != whole[1]
    prepared = accelerator(dispatch_batches=dispatch).prepare(noisy())
    assert [drawn(prepared), drawn(prepared)] == whole[:2]
    prepared.set_epoch(3)
    assert drawn(skip_first_batches(prepared, 2)) == whole[3][2 * BATCH :]
    resumed = skip_first_batches(accelerator(dispatch_batches=dispatch).prepare(noisy()), 2)
    resumed.set_epoch(2)
    assert drawn(resumed) == whole[2][2 * BATCH :]


# -- state (R35 to R37) ----------------------------------------------------------------------------


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("taken", [0, 3, BATCHES])
def test_r35_a_prepared_loader_goes_on_with_the_rest(taken: int, stateful: bool) -> None:
    if stateful:
        pytest.importorskip("torchdata")  # accelerate asks for it
    prepared = accelerator(use_stateful_dataloader=stateful).prepare(numbers())
    assert type(prepared.base_dataloader) is DataLoader
    assert prepared.use_stateful_dataloader is stateful
    iterator = iter(prepared)
    seen = [item for _ in range(taken) for item in next(iterator).tolist()]
    state = pickle.loads(pickle.dumps(prepared.state_dict()))
    assert state["_num_yielded"] == taken
    assert state["_iterator_finished"] is (taken == BATCHES)
    other = accelerator(use_stateful_dataloader=stateful).prepare(numbers(backend="fork"))
    other.load_state_dict(state)
    rest = flat(other)
    assert seen + rest == list(range(20)) if taken < BATCHES else rest == list(range(20))
    assert flat(other) == list(range(20))
    del iterator
    gc.collect()


@pytest.mark.usefixtures("kept")
def test_save_state_and_load_state_go_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")

    def start() -> tuple[Any, Any]:
        torch.manual_seed(2)
        helper = accelerator(use_stateful_dataloader=True)
        return helper, helper.prepare(numbers(shuffle=True))

    _, reference = start()
    whole = [flat(reference), flat(reference)]
    helper, loader = start()
    seen = []
    for batch in loader:
        seen += batch.tolist()
        if len(seen) == 3 * BATCH:
            helper.save_state(str(tmp_path))
            break
    helper, loader = start()
    helper.load_state(str(tmp_path))
    assert [seen + flat(loader), flat(loader)] == whole
