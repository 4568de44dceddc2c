"""``seeding="sample"`` on threads: what is put in place of the global generators, and what gets past."""

from __future__ import annotations

import gc
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import choice as taken_choice
from random import gauss as taken_gauss
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import sample as taken_sample
from numpy.random import seed as taken_seed
from support.random_datasets import Drawing, add, collate, states
from torch.utils.data import Dataset, get_worker_info

from hybridloader import DataLoader, Pipeline, SampleSeeding, rng


def seeded(function: Callable[[int], Any], items: int = 1, **where: Any) -> Any:
    """A run over numbers, with a seed, of which one worker makes what `function` returns."""
    where = {"backend": "threads", "num_workers": 1, "seeding": "sample", **where}
    return Pipeline.from_iterable(range(items)).map(function, **where).run(seed=1)


@contextmanager
def seeding_on_threads() -> Iterator[None]:
    """A loader with threads that have begun to seed samples each."""
    options: Any = {"num_workers": 2, "backend": "threads", "seeding": "sample"}
    iterator: Any = iter(DataLoader(Drawing(), 4, collate_fn=collate, **options))
    next(iterator), next(iterator)  # one of each worker: both have begun
    yield
    iterator.close()


DRAWN: dict[str, Callable[[], Any]] = {
    "random": lambda: [random.random(), random.gauss(0, 1), random.gauss(0, 1)],
    "bits": lambda: [random.getrandbits(77), random.randbytes(5), random.randrange(10**30)],
    "order": lambda: [random.sample(range(50), 9), random.choices("abc", k=7)],
    "shuffle": lambda: [random.shuffle(list(range(9))), random.random()],
    "reseeded": lambda: [random.seed(4), random.random(), random.seed("x"), random.random()],
    "random's state": lambda: [random.setstate(random.getstate()), random.getstate()],
    "numpy": lambda: [np.random.rand(2).tolist(), np.random.randn(3).tolist()],
    "numpy ints": lambda: [
        np.random.randint(9, size=4).tolist(),
        np.random.permutation(9).tolist(),
    ],
    "numpy others": lambda: [np.random.sample(2).tolist(), np.random.ranf(), np.random.bytes(3)],
    "numpy reseeded": lambda: [np.random.seed(4), np.random.rand()],
    "numpy's state": lambda: np.random.get_state()[1].tolist(),
    "numpy mtrand": lambda: np.random.mtrand.rand(),
    "numpy's instance": lambda: [
        np.random.mtrand._rand.permutation(9).tolist(),
        np.random.RandomState(np.random.get_bit_generator()).rand(),
    ],
    "numpy by name": lambda: [taken_seed(4), taken_sample(2).tolist()],
    "torch": lambda: [
        torch.rand(2).tolist(),
        torch.randn(2).tolist(),
        torch.randint(9, (3,)).tolist(),
    ],
    "torch like": lambda: [
        torch.rand_like(torch.ones(2)).tolist(),
        torch.randn_like(torch.ones(2)).tolist(),
        torch.randint_like(torch.ones(2), 9).tolist(),
    ],
    "torch like, with options": lambda: [
        torch.rand_like(torch.ones(2, requires_grad=True), requires_grad=True).tolist(),
        torch.rand_like(torch.ones(2, 3, 4, 5), memory_format=torch.channels_last).tolist(),
        torch.rand_like(torch.ones(3, 4).t(), dtype=torch.float16).tolist(),
        torch.randn_like(torch.ones(4, 20)[:, ::2], dtype=torch.complex64).tolist(),
        torch.randn_like(torch.ones(40, dtype=torch.bfloat16), device="cpu").tolist(),
        torch.randint_like(torch.ones(4), 3, 9, dtype=torch.int64).tolist(),
        torch.randint_like(input=torch.ones(4, dtype=torch.uint8), high=9).tolist(),
    ],
    "torch in place": lambda: [
        torch.empty(2).uniform_().tolist(),
        torch.empty(2).normal_().tolist(),
        torch.empty(2).random_().tolist(),
        torch.empty(2).exponential_().tolist(),
        torch.ones(3).bernoulli_(0.5).tolist(),
        torch.empty(2).cauchy_().tolist(),
        torch.empty(2).log_normal_().tolist(),
        torch.empty(2).geometric_(0.5).tolist(),
    ],
    "torch sampling": lambda: [
        torch.randperm(7).tolist(),
        torch.multinomial(torch.ones(7), 3).tolist(),
        torch.ones(7).multinomial(3).tolist(),
        torch.bernoulli(torch.full((9,), 0.5)).tolist(),
        torch.poisson(torch.ones(4)).tolist(),
        torch.normal(0.0, 1.0, (2,)).tolist(),
        torch.normal(torch.zeros(2), 1.0).tolist(),
        torch.binomial(torch.full((3,), 9.0), torch.full((3,), 0.5)).tolist(),
    ],
    "distributions": lambda: [
        torch.distributions.Normal(0.0, 1.0).sample().item(),
        torch.distributions.Gamma(torch.ones(1), 1.0).sample().item(),
        torch.distributions.Dirichlet(torch.ones(3)).sample().tolist(),
        torch.distributions.Categorical(torch.ones(9)).sample().item(),
    ],
    "init": lambda: [
        torch.nn.init.uniform_(torch.empty(2)).tolist(),
        torch.nn.init.trunc_normal_(torch.empty(2)).tolist(),
        torch.nn.init.kaiming_uniform_(torch.empty(2, 2)).tolist(),
        torch.nn.init.xavier_normal_(torch.empty(2, 2)).tolist(),
        torch.nn.init.orthogonal_(torch.empty(2, 2)).tolist(),
    ],
    "module": lambda: torch.nn.Linear(2, 2).weight.tolist(),
    "torch reseeded": lambda: [torch.manual_seed(4) and None, torch.rand(1).item()],
    "torch's state": lambda: [torch.set_rng_state(torch.get_rng_state()), torch.rand(1).item()],
    "torch's seed": lambda: torch.initial_seed(),
    "fork_rng": lambda: _forked(),
    "loader": lambda: [b.tolist() for b in DataLoader(range(9), 9, shuffle=True)],
    "taken from random": lambda: [taken_choice(range(99)), taken_gauss(0, 1)],
    "split": lambda: list(torch.utils.data.random_split(range(9), [4, 5])[0]),
}


def _forked() -> Any:
    with torch.random.fork_rng(devices=[]):
        inside = torch.rand(1).item()
    return inside, torch.rand(1).item()


def draw(item: int) -> Any:
    """Return what one of `DRAWN` draws, twice: whatever it did to its generators, of the same seed."""
    return [*DRAWN.values()][item // 2]()


def test_what_is_drawn_on_a_thread_is_what_a_process_draws() -> None:
    before = states()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = list(seeded(draw, 2 * len(DRAWN)))
    assert states() == before
    wanted = list(seeded(draw, 2 * len(DRAWN), backend="fork"))
    names = [*DRAWN]
    assert [names[n // 2] for n, one in enumerate(found) if one != wanted[n]] == []


def test_what_the_loop_draws_meanwhile_is_its_own() -> None:
    """The loop draws while a sample is being made: what it would draw without a loader."""
    begun, done = threading.Event(), threading.Event()

    def sample(_: int) -> Any:
        begun.set()
        done.wait(30)
        return DRAWN["random"]()

    def loop() -> list[Any]:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        random.gauss(0, 1)
        return [function() for name, function in DRAWN.items() if "re" not in name]

    with seeded(sample) as run:
        begun.wait(30)
        during = loop()
        done.set()
        found = list(run)
    assert during == loop()
    assert found == list(seeded(lambda _: DRAWN["random"](), backend="fork"))


def attributes() -> list[Any]:
    """All that could have been replaced."""
    homes: tuple[Any, ...] = (random, np.random, np.random.mtrand, torch, torch.random)
    names = [[n for n in dir(home) if not n.startswith("_hybridloader")] for home in homes]
    found = [[getattr(h, n) for n in ns] for h, ns in zip(homes, names, strict=True)]
    codes = [getattr(value, "__code__", None) for value in found[-1]]
    return [*found, codes, type(random._inst), vars(random._inst).copy()]


def test_everything_is_as_it_was_when_the_last_is_gone() -> None:
    gc.collect()
    before = attributes()
    with seeding_on_threads():
        with seeding_on_threads():
            assert type(random._inst) is not random.Random
        assert type(random._inst) is not random.Random
    assert attributes() == before
    list(Pipeline.from_dataset(range(9)).map(add, seeding="sample"))
    gc.collect()
    assert attributes() == before


def test_functions_that_were_taken_meanwhile_serve_for_ever() -> None:
    """A module that a sample imports may take them, and a thread may be in one at that moment."""
    with seeding_on_threads():
        kept = random.random, random.getrandbits, random.seed, random.getstate, random.setstate
        kept_rand = np.random.rand
    assert type(random._inst) is random.Random
    draw, bits, seed, getstate, setstate = kept
    seed(5)
    found = [draw(), bits(70)]
    state = getstate()
    found.append(draw())
    setstate(state)
    found.append(draw())
    random.seed(5)
    assert found[:3] == [random.random(), random.getrandbits(70), random.random()]
    assert found[3] == found[2]
    np.random.seed(5)
    first = kept_rand()
    np.random.seed(5)
    assert first == np.random.rand()


class Nested(Dataset[Any]):
    """A sample that makes a loader over seeded samples, and draws before and after."""

    def __init__(self, seeding: Any) -> None:
        self.seeding = seeding

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        own, info = rng(), get_worker_info()
        first = [random.random(), float(np.random.rand()), torch.rand(1).item()]
        inner = list(DataLoader(Drawing(), 8, collate_fn=collate, seeding=self.seeding))
        inner += list(Pipeline.from_dataset(range(3)).map(add, seeding="sample").run(seed=3))
        assert rng() is own
        assert get_worker_info() is info
        return first, inner, [random.random(), float(np.random.rand()), torch.rand(1).item()]


@pytest.mark.parametrize("seeding", ["sample", SampleSeeding(3)])
def test_a_sample_may_make_samples(seeding: Any) -> None:
    dataset = Nested(seeding)

    def run(**where: Any) -> Any:
        return list(DataLoader(dataset, collate_fn=list, seeding=SampleSeeding(1), **where))

    assert run() == run(num_workers=2, backend="threads") == run(num_workers=2, backend="fork")
