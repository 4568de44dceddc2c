"""Collation equals torch's, whose function is the oracle; its memory comes from slots, used again."""

from __future__ import annotations

import collections
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data
from support import comparison
from support.comparison import same_tensors
from support.failing_datasets import Samples
from torch.utils.data import Dataset, IterableDataset, default_collate
from torch.utils.data._utils import collate as torchs

from hybridloader import DataLoader
from hybridloader.engine import PrivateSlots

SIDE = 300
"""Rows and columns of a square sample: with 4 bytes an element, two of them are well above OWN."""


class Pair(NamedTuple):
    left: Any
    right: Any


def square(index: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(SIDE * SIDE).reshape(SIDE, SIDE) % 97 + index).to(dtype)


def ours(make: Callable[[int], Any], backend: Any, workers: int, **options: Any) -> list[Any]:
    loader = DataLoader(Samples(make), 4, num_workers=workers, backend=backend, **options)
    with iter(loader) as batches:
        return list(batches)


def torchs_own(make: Callable[[int], Any], **options: Any) -> list[Any]:
    return list(torch.utils.data.DataLoader(Samples(make), 4, **options))


def same(a: Any, b: Any) -> None:
    """Check that `a` equals `b`, also in the order of dimensions."""

    def tensors(a: torch.Tensor, b: torch.Tensor) -> None:
        same_tensors(a, b)
        assert a.layout is not torch.strided or a.stride() == b.stride()

    comparison.same(a, b, tensors)


def squares(index: int) -> Any:
    return square(index), index


def nested(index: int) -> Any:
    return {
        "tuple": (square(index), [square(index, torch.int64), float(index)]),
        "ordered": collections.OrderedDict(image=square(index, torch.float16), name=f"n{index}"),
        "pair": Pair(square(index), b"x"),
        "flag": index % 2 == 0,
    }


pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:backend=.* has no workers"),
]

WAYS = [
    pytest.param("inline", 0, id="caller"),
    pytest.param("threads", 2, id="threads"),
    pytest.param("fork", 2, id="fork"),
    pytest.param("spawn", 1, id="spawn", marks=pytest.mark.full),
]
ways = pytest.mark.parametrize(("backend", "workers"), WAYS)


OWN = 256 << 10
"""Bytes from which on a batch has a slot."""


class Marked(torch.Tensor):
    """A user's own kind of tensor."""


# -- equal to torch's ------------------------------------------------------------------------------


def arrays(index: int) -> Any:
    whole = np.arange(SIDE * SIDE, dtype=np.float64).reshape(SIDE, SIDE) % 97 + index
    return {
        **{kind: whole.astype(kind) for kind in ("f2", "f4", "f8", "u1", "i2", "i8", "c8", "?")},
        "transposed": whole.T,
        "cut": whole[:, 1::2],
        "scalar": np.float32(index),
        "0-d": np.array(index),
    }


class Tagged(torch.Tensor):
    """Carries an attribute along, and knows what was done to it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        found = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(found, cls) and isinstance(args[0], (list, cls)):
            first = args[0][0] if isinstance(args[0], list) else args[0]
            vars(found).update({**vars(first), "by": getattr(func, "__name__", None)})
        return found


class Unwrapped(torch.Tensor):
    """Gives plain tensors, as torchvision's `tv_tensors` do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def of_subclasses(index: int) -> Any:
    tagged = square(index).as_subclass(Tagged)
    tagged.label = {"of": [index]}  # type: ignore[attr-defined]
    return {
        "marked": square(index).as_subclass(Marked),
        "tagged": tagged,
        "unwrapped": square(index).as_subclass(Unwrapped),
        "frozen": torch.nn.Parameter(square(index), requires_grad=False),
        "small": square(index)[0].as_subclass(Tagged),
    }


@ways
def test_large_batches_equal_torchs(backend: str, workers: int) -> None:
    for make in (nested, arrays):
        for batch, expected in zip(ours(make, backend, workers), torchs_own(make), strict=True):
            same(batch, expected)
    # Subclasses keep type and attributes as torch's workers have them.
    theirs = torchs_own(of_subclasses, num_workers=workers)
    for batch, other in zip(ours(of_subclasses, backend, workers), theirs, strict=True):
        for name, tensor in batch.items():
            assert type(tensor) is type(other[name])
            assert vars(tensor) == vars(other[name])
        same(batch, other)


def conjugated(t: torch.Tensor) -> torch.Tensor:
    return torch.complex(t, t + 1).conj()


IN_SLOTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{
        name: lambda t, name=name: t.to(getattr(torch, name))  # type: ignore[misc]
        for name in ("bool", "uint16", "bfloat16", "complex128", "float8_e5m2")
    },
    "transposed": lambda t: t.T,
    "with gaps": lambda t: t[::2],
    "expanded": lambda t: t[:1].expand(SIDE, SIDE),
    "conjugated": conjugated,
    "negated": lambda t: conjugated(t).imag,
    "4-d": lambda t: t.reshape(3, 4, 75, 100).to(memory_format=torch.channels_last),
    "as large as a slot's": lambda t: torch.ones(OWN // 4, dtype=torch.uint8),
    "as large in other units": lambda t: torch.ones(OWN // 32, dtype=torch.float64),
}
LEFT_TO_TORCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "requires grad": lambda t: t.requires_grad_(),
    "parameter": torch.nn.Parameter,
    "subclass": lambda t: t.as_subclass(Marked),
    "meta": lambda t: torch.empty(SIDE, SIDE, device="meta"),
    "small": lambda t: torch.ones(OWN // 4 - 1, dtype=torch.uint8),
    "small in other units": lambda t: torch.ones(OWN // 32 - 1, dtype=torch.float64),
}


def test_large_batches_of_any_dtype_and_strides_lie_in_slots_as_torchs_workers_stack_them(
    slots: PrivateSlots,
) -> None:
    for name, of in IN_SLOTS.items():
        samples = [of(square(k)) for k in range(4)]
        before = slots.pool.size
        batch = default_collate(samples)
        assert slots.pool.size >= before + batch.nbytes, name
        assert batch._base is None
        # torch's worker stacks into shared memory of its own, which is contiguous.
        expected = torch.empty((4, *samples[0].shape), dtype=samples[0].dtype)
        torch.stack(samples, out=expected)
        if "float8" in name:  # torch can't compare it
            batch, expected = batch.view(torch.uint8), expected.view(torch.uint8)
        same(batch, expected)
        kept.append(batch)
    kept.clear()


kept: list[torch.Tensor] = []
"""Batches whose slots are not used again meanwhile."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_small_and_odd_tensors_are_left_to_torch(slots: PrivateSlots) -> None:
    for name, of in LEFT_TO_TORCH.items():
        before = slots.pool.size
        got = default_collate([of(square(k)) for k in range(4)])
        assert slots.pool.size == before or "small" not in name
        with ThreadPoolExecutor(1) as pool:  # a thread without slots
            plain = pool.submit(lambda of=of: default_collate([of(square(k)) for k in range(4)]))
        expected = plain.result()
        assert (type(got), got.layout, got.device) == (type(expected), expected.layout, got.device)
        assert (got.grad_fn is None) == (expected.grad_fn is None)
        if got.device.type != "meta":
            same(got.detach(), expected.detach())
    for words, odd in (
        ("nested", lambda k: torch.nested.nested_tensor([square(k)])),
        ("sparse", lambda k: square(k).to_sparse()),
    ):
        with pytest.raises(RuntimeError, match=f"{words} tensors are not currently supported"):
            default_collate([odd(k) for k in range(8)])
    # One odd tensor among plain ones.
    plain_ones = [square(k) for k in range(8)]
    grad = default_collate([*plain_ones, square(9).requires_grad_()])
    assert grad.requires_grad
    grad.sum().backward()
    mixed = default_collate([*plain_ones, square(9, torch.float64)])
    assert mixed.dtype is torch.float64
    assert torch.equal(mixed[3], plain_ones[3].double())
    assert type(default_collate([*plain_ones, square(9).as_subclass(Marked)])) is Marked


def unequal(index: int) -> Any:
    return torch.zeros(SIDE, SIDE + (index == 6))


@ways
def test_samples_of_unequal_shapes_raise_torchs_own_words_and_the_rest_goes_on(
    backend: str, workers: int
) -> None:
    with pytest.raises(RuntimeError) as torchs_words:
        default_collate([unequal(4), unequal(5), unequal(6), unequal(7)])
    loader = DataLoader(Samples(unequal, 12), 4, num_workers=workers, backend=backend)
    with iter(loader) as batches:
        assert next(batches).shape == (4, SIDE, SIDE)
        with pytest.raises(RuntimeError) as words:
            next(batches)
        assert str(torchs_words.value) in str(words.value)
        assert next(batches).shape == (4, SIDE, SIDE)


# -- where the memory is ---------------------------------------------------------------------------


@ways
def test_memory_comes_again_when_batches_are_dropped_and_one_that_is_kept_never_changes(
    backend: str, workers: int
) -> None:
    dataset = Samples(squares, 160)
    loader = DataLoader(dataset, 4, num_workers=workers, backend=backend)
    seen, kept = [], []
    with iter(loader) as batches:
        for number, (image, _) in enumerate(batches):
            seen.append(image.data_ptr())
            if number in (3, 4, 17):
                kept.append((number, image[1:3], image.clone()))
            del image
    addresses = collections.Counter(seen)
    assert len(addresses) <= 20  # of 40: window, those kept, those on their way
    assert max(addresses.values()) >= 3
    for number, part, whole in kept:
        assert torch.equal(part, whole[1:3])
        assert torch.equal(part[0], square(4 * number + 1))


def calls_default_collate(samples: list[Any]) -> Any:
    images, labels = zip(*samples, strict=True)
    return default_collate(images), default_collate(labels)


def passes_the_map_on(samples: list[Any]) -> Any:
    return torchs.collate(samples, collate_fn_map=torchs.default_collate_fn_map)


def passes_a_map_of_its_own(samples: list[Any]) -> Any:
    chosen = {**torchs.default_collate_fn_map, int: lambda batch, **_: torch.tensor(batch)}
    return torchs.collate(samples, collate_fn_map=chosen)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (squares(k) for k in range(160))


@pytest.mark.parametrize(
    ("backend", "workers", "dataset", "collate_fn"),
    [
        ("inline", 0, Samples(squares, 160), calls_default_collate),
        ("threads", 2, Samples(squares, 160), calls_default_collate),
        ("threads", 2, Samples(squares, 160), passes_the_map_on),
        ("fork", 2, Samples(squares, 160), passes_a_map_of_its_own),
        ("threads", 1, Stream(), None),
        *(
            (
                "threads",
                1,
                Samples(lambda k, kind=kind: (square(k).as_subclass(kind), k), 160),
                None,
            )
            for kind in (Marked, Tagged, Unwrapped)
        ),
    ],
)
def test_a_users_own_function_iterable_datasets_and_subclasses_get_slots_too(
    backend: str, workers: int, dataset: Any, collate_fn: Any
) -> None:
    loader = DataLoader(dataset, 4, num_workers=workers, collate_fn=collate_fn, backend=backend)
    seen = []
    with iter(loader) as batches:
        for number, (image, label) in enumerate(batches):
            seen.append(image.data_ptr())
            assert label.tolist() == list(range(4 * number, 4 * number + 4))
            assert torch.equal(image[3].as_subclass(torch.Tensor), square(4 * number + 3))
            del image
    assert len(set(seen)) <= 20  # of 40


class Hoarding(Dataset[Any]):
    """Keeps what it has collated, and looks whether somebody wrote to it."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        for number, tensor in self.kept:
            assert (tensor == number).all(), f"what {number} had kept has changed"
        self.kept.append((index, default_collate([torch.full((SIDE, SIDE), index)] * 4)))
        return torch.full((SIDE, SIDE), index)


@ways
def test_what_a_workers_own_code_collates_and_keeps_stays_its_own(
    backend: str, workers: int
) -> None:
    loader = DataLoader(Hoarding(), 4, num_workers=workers, backend=backend)
    with iter(loader) as batches:
        for number, batch in enumerate(batches):
            assert batch[:, 0, 0].tolist() == list(range(4 * number, 4 * number + 4))
            batch.zero_()  # ours to write to


# -- whose function it is --------------------------------------------------------------------------


def test_who_has_changed_torchs_map_finds_it_as_it_was(torchs_map: dict[Any, Any]) -> None:
    def mine(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return "mine", len(batch)

    torchs_map[torch.Tensor] = mine
    for backend, workers in (("threads", 2), ("fork", 1), ("inline", 0)):
        assert ours(square, backend, workers) == [("mine", 4)] * 2
    assert torchs_map[torch.Tensor] is mine


NUMBERS = [
    [1, 2], [1, True], [1, 2.5], [1, np.int64(2)], [1, torch.tensor(2)], [-(2**63), 2**63 - 1],
    [1, np.float32(2)], [1.5, 2], [1.5, float("nan")], [1.5, np.float64(2)], [1.5, np.longdouble(2)],
    [1.5, torch.tensor(2.0)], [1.5, torch.ones(1, requires_grad=True)[0]], [2.5, True], (1, 2),
    [1, 2**63], [1, "2"], [1.5, None], [1, [2]], [True, False], [True, 2], range(2), bytes(8),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_numbers_collate_to_what_torch_makes_of_them(device: str, slots: PrivateSlots) -> None:
    def tensor(batch: Any) -> Any:
        return torch.tensor(batch, dtype=torch.float64 if type(batch[0]) is float else None)

    def outcome(collate: Callable[[Any], Any], numbers: Any) -> Any:
        try:
            made = collate(numbers)
        except Exception as error:
            return type(error), str(error)
        return made.dtype, made.device, None if device == "meta" else repr(made), made.requires_grad

    with torch.device(device):
        for numbers in NUMBERS:
            assert outcome(default_collate, numbers) == outcome(tensor, numbers), numbers
    for collate in (torchs.collate_int_fn, torchs.collate_float_fn):
        assert torch.equal(collate([]), torch.tensor([]))


def test_torchs_function_stays_the_one_of_its_map_and_of_pickles(slots: PrivateSlots) -> None:
    held = torchs.collate_tensor_fn  # as a library that has taken it from there
    ours(square, "inline", 0)
    ours(square, "inline", 2)
    assert slots.pool.size == 0, "a loader in the caller gives the thread back as it was"
    found = held([square(k) for k in range(4)])
    assert torch.equal(found[3], square(3))
    assert slots.pool.size >= found.nbytes
    assert torchs.default_collate_fn_map[torch.Tensor] is torchs.collate_tensor_fn is held
    assert pickle.loads(pickle.dumps(held)) is held


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_own_loader_works_as_ever_after_ours(workers: int) -> None:
    expected = ours(nested, "threads", 1)  # and torch is taught
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
    found = torchs_own(nested, num_workers=workers, **options)
    for batch, ours_ in zip(found, expected, strict=True):
        same(batch, ours_)
    assert found[0]["tuple"][0].is_shared() == (workers > 0)  # by torch's own way


def test_a_large_batch_of_the_caller_is_resized_as_little_as_one_of_torchs_workers() -> None:
    """Advice of docs/backends.md, which is followed here."""
    [numbers, *_] = ours(index_alone, "threads", 1)
    assert numbers.resize_(9).shape == (9,)
    [batch, *_] = ours(square, "inline", 0)
    [theirs, *_] = torchs_own(square, num_workers=1, multiprocessing_context="fork")
    for one in (batch, theirs):
        assert one.clone().resize_(5, SIDE, SIDE).shape == (5, SIDE, SIDE)
        with pytest.raises(RuntimeError, match="resize storage that is not resizable"):
            one[:].resize_(5, SIDE, SIDE)  # a view: what torch refuses to resize is in ruins


def index_alone(index: int) -> int:
    return index
