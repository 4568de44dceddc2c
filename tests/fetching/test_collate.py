"""Collation into slots equals torch's: torch's function is the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from support.collating import SIDE, Made, nested, ours, same, square, squares, torchs_own
from torch.utils.data import default_collate

from hybridloader import DataLoader
from hybridloader.engine.worker import worker_info_set
from hybridloader.memory.slots import PrivateSlots, set_slots

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:backend=.* has no workers"),
]

WAYS = [
    pytest.param("inline", 0, id="caller"),
    pytest.param("inline", 2, id="inline"),
    pytest.param("threads", 2, id="threads"),
    pytest.param("fork", 2, id="fork"),
    pytest.param("shared-memory", 2, id="shared-memory"),
    pytest.param("spawn", 1, id="spawn", marks=pytest.mark.full),
]
IN_PROCESS = WAYS[:3]


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


class Fussy(torch.Tensor):
    """Knows nothing of memory that it is given."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.new:
            raise TypeError("I make no others")
        return super().__torch_function__(func, types, args, kwargs or {})


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


@pytest.mark.parametrize(("backend", "workers"), [("inline", 0), ("threads", 2), ("fork", 1)])
def test_subclasses_keep_type_and_attributes_as_torchs_workers_have_them(
    backend: Any, workers: int
) -> None:
    expected = torchs_own(of_subclasses, num_workers=workers)
    for batch, other in zip(ours(of_subclasses, backend, workers), expected, strict=True):
        for name, tensor in batch.items():
            assert type(tensor) is type(other[name])
            assert vars(tensor) == vars(other[name])
        same(batch, other)


@pytest.mark.parametrize("kind", [Marked, Tagged, Unwrapped])
def test_subclasses_are_collated_into_slots_where_torchs_workers_give_memory(
    kind: Any, slots: PrivateSlots
) -> None:
    samples = [square(k).as_subclass(kind) for k in range(4)]
    default_collate(samples)
    assert slots.size == 0
    with worker_info_set(Info()):  # type: ignore[arg-type]
        found = default_collate(samples)
    assert slots.size >= found.nbytes
    assert slots.pool.find(found.data_ptr(), found.nbytes) is not None
    assert torch.equal(found[3].as_subclass(torch.Tensor), square(3))


class Info:
    """Worker info with a seed only."""


def test_a_subclass_that_refuses_a_slot_is_collated_all_the_same(slots: PrivateSlots) -> None:
    with worker_info_set(Info()):  # type: ignore[arg-type]
        found = default_collate([square(k).as_subclass(Fussy) for k in range(4)])
    assert type(found) is Fussy
    assert torch.equal(found[3].as_subclass(torch.Tensor), square(3))


@pytest.mark.parametrize("make", [squares, nested, arrays])
@pytest.mark.parametrize(("backend", "workers"), WAYS)
def test_large_batches_equal_torchs(backend: str, workers: int, make: Any) -> None:
    for batch, expected in zip(ours(make, backend, workers), torchs_own(make), strict=True):
        same(batch, expected)


_DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
    "complex64 complex128 float8_e4m3fn float8_e5m2"
)


@pytest.mark.parametrize("name", _DTYPES.split())
def test_a_batch_of_every_dtype_lies_in_a_slot_and_equals_torchs(
    name: str, slots: PrivateSlots
) -> None:
    samples = [square(k).to(getattr(torch, name)) for k in range(8)]
    batch = default_collate(samples)
    assert slots.size >= batch.nbytes
    assert batch.dtype is samples[0].dtype
    assert batch._base is None
    for sample, row in zip(samples, batch, strict=True):
        assert torch.equal(sample.view(torch.uint8), row.view(torch.uint8))


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(lambda t: t.T, id="transposed"),
        pytest.param(lambda t: t[::2], id="with gaps"),
        pytest.param(lambda t: t[:1].expand(SIDE, SIDE), id="expanded"),
        pytest.param(lambda t: torch.complex(t, t + 1).conj(), id="conjugated"),
        pytest.param(lambda t: torch.complex(t, t + 1).conj().imag, id="negated"),
        pytest.param(lambda t: t.reshape(-1), id="flat"),
        pytest.param(lambda t: t.reshape(SIDE, SIDE // 4, 4).permute(2, 0, 1), id="channels last"),
        pytest.param(
            lambda t: t.reshape(3, 4, 75, 100).to(memory_format=torch.channels_last), id="4-d"
        ),
    ],
)
def test_samples_of_any_strides_collate_to_what_torchs_workers_give(
    of: Any, slots: PrivateSlots
) -> None:
    samples = [of(square(k)) for k in range(8)]
    batch = default_collate(samples)
    assert slots.size >= batch.nbytes
    # torch's worker stacks into shared memory of its own, which is contiguous.
    expected = torch.empty((8, *samples[0].shape), dtype=samples[0].dtype)
    torch.stack(samples, out=expected)
    same(batch, expected)


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(lambda t: t.requires_grad_(), id="requires grad"),
        pytest.param(lambda t: torch.nn.Parameter(t), id="parameter"),
        pytest.param(lambda t: t.as_subclass(Marked), id="subclass"),
        pytest.param(lambda t: torch.empty(SIDE, SIDE, device="meta"), id="meta"),
    ],
)
def test_odd_tensors_are_left_to_torch(of: Any, slots: PrivateSlots) -> None:
    got = default_collate([of(square(k)) for k in range(8)])
    set_slots(None)
    expected = default_collate([of(square(k)) for k in range(8)])
    assert (type(got), got.layout, got.device) == (type(expected), expected.layout, expected.device)
    assert (got.grad_fn is None) == (expected.grad_fn is None)
    if got.device.type != "meta":
        same(got.detach(), expected.detach())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_raise_torchs_own_words(slots: PrivateSlots) -> None:
    with pytest.raises(RuntimeError, match="nested tensors are not currently supported"):
        default_collate([torch.nested.nested_tensor([square(k)]) for k in range(8)])


def test_sparse_tensors_raise_torchs_own_words(slots: PrivateSlots) -> None:
    with pytest.raises(RuntimeError, match="sparse tensors are not currently supported"):
        default_collate([square(k).to_sparse() for k in range(8)])
    assert slots.size == 0


def test_one_odd_tensor_among_plain_ones_is_left_to_torch(slots: PrivateSlots) -> None:
    plain = [square(k) for k in range(8)]
    grad = default_collate([*plain, square(9).requires_grad_()])
    assert grad.requires_grad
    grad.sum().backward()
    mixed = default_collate([*plain, square(9, torch.float64)])
    assert mixed.dtype is torch.float64
    assert torch.equal(mixed[3], plain[3].double())
    marked = default_collate([*plain, square(9).as_subclass(Marked)])
    assert type(marked) is Marked


def unequal(index: int) -> Any:
    return torch.zeros(SIDE, SIDE + (index == 6))


@pytest.mark.parametrize(("backend", "workers"), WAYS)
def test_samples_of_unequal_shapes_raise_torchs_own_words_and_the_rest_goes_on(
    backend: str, workers: int
) -> None:
    with pytest.raises(RuntimeError) as torchs_words:
        default_collate([unequal(4), unequal(5), unequal(6), unequal(7)])
    loader = DataLoader(Made(unequal, 12), 4, num_workers=workers, backend=backend)
    with iter(loader) as batches:
        assert next(batches).shape == (4, SIDE, SIDE)
        with pytest.raises(RuntimeError) as words:
            next(batches)
        assert str(torchs_words.value) in str(words.value)
        assert next(batches).shape == (4, SIDE, SIDE)
