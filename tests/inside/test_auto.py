"""``num_workers="auto"`` and ``backend="auto"``: no batch, order or random number depends on them."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.utils.data
from support.failing_datasets import Samples
from support.tuned_subject import Auto, Cost, Limits, LoaderSubject, Place, Scripted, choosing

from hybridloader import DataLoader

DRAWS: Any = Samples(lambda index: (index, torch.rand(())), 60)


def epochs(loader: Any) -> list[Any]:
    return [[batch[0].tolist() + batch[1].tolist() for batch in loader] for _ in range(2)]


WORDS: list[dict[str, Any]] = [
    {"num_workers": "auto", "backend": "auto"},
    {"num_workers": "auto"},
    {"num_workers": "auto", "backend": "threads"},
    {"num_workers": 2, "backend": "auto"},
]


@pytest.mark.parametrize("words", WORDS, ids=str)
def test_batches_order_and_random_numbers_do_not_depend_on_the_choice(
    words: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choosing, "SECONDS", 0.3)

    def run(**more: Any) -> tuple[Any, torch.Tensor, DataLoader]:
        torch.manual_seed(4)
        loader = DataLoader(DRAWS, 8, shuffle=True, seeding="sample", **more)
        return epochs(loader), torch.rand(2), loader

    expected, then, _ = run()
    found, now, loader = run(**words)
    assert found == expected
    assert torch.equal(now, then)
    assert loader.tuning is not None
    assert "beyond the limits" not in str(loader.tuning), "a plan that nobody chose"
    (place,) = loader.tuning.plan
    assert loader.num_workers == place.workers
    assert loader.num_workers == words["num_workers"] or words["num_workers"] == "auto"
    assert words.get("backend") != "threads" or place.backend in ("threads", "inline")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["hybridloader"]  # once, not each epoch
    assert str(place) in lines[0]


def test_only_what_is_auto_is_changed() -> None:
    loader = DataLoader(DRAWS, 8, num_workers=3, backend="threads", threads_per_worker=2)
    subject = LoaderSubject(loader, keep_threads=True)
    limits = Limits(8, backends=("inline", "threads", "fork"))
    for auto, allowed in (
        (Auto(workers=True, backend=False), lambda p: p.backend in ("inline", "threads")),
        (Auto(workers=False, backend=True), lambda p: p.workers == 3 and p.backend != "inline"),
    ):
        scripted = Scripted((Cost(held=4e-3, sending=1e-4),), subject.start, 8.0)
        scripted.stages = subject.stages
        tuner = choosing.tuner_of(
            scripted, auto, limits, clock=scripted.clock, stream=io.StringIO()
        )  # type: ignore[arg-type]
        tuning = tuner.run()
        assert all(allowed(place) for plan in scripted.opened for place in plan)
        assert all(place.threads == 1 for plan in scripted.opened for place in plan)
        if auto.backend:
            assert tuning.plan == (Place("fork", 3),)  # Python work: the processes win


def test_what_can_t_be_chosen_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(ValueError, match="are for map-style datasets"):
        DataLoader(Stream(), num_workers="auto")
    with pytest.raises(ValueError, match="has no choice with num_workers=0"):
        DataLoader(DRAWS, backend="auto")
    with pytest.raises(ValueError, match="contradicts multiprocessing_context"):
        DataLoader(DRAWS, num_workers=2, backend="auto", multiprocessing_context="spawn")


def breaks(index: int) -> Any:
    raise KeyError("gone")


def test_an_error_of_the_dataset_is_raised_by_iter_and_again() -> None:
    broken: Any = Samples(breaks)
    loader = DataLoader(broken, 8, num_workers="auto")
    for _ in range(2):
        with pytest.raises(KeyError, match="gone"):
            iter(loader)
