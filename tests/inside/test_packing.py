"""Values there and back: packing, the frames that carry it, and the dataset's own way to a worker."""

from __future__ import annotations

import copyreg
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from itertools import product
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from support.packed_values import (
    IN_BAND,
    NUMPY_DTYPES,
    OWN,
    WAYS,
    Color,
    pack,
    through_slots,
    unpack,
)
from support.platforms import GIL
from support.slot_pairs import writer_and_reader

from hybridloader.engine import ResultPicklingError

# -- numpy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_arrays_of_every_dtype_come_back_equal_and_writable(way: Any) -> None:
    shapes: list[tuple[int, ...]] = [(), (0, 3), (100, 50)]
    for kind, shape in product(map(np.dtype, NUMPY_DTYPES), shapes):
        count = int(np.prod(shape))
        array = np.resize(np.arange(65, 91, dtype=np.uint8), count * kind.itemsize)
        if kind.kind == "U":
            array = np.full(count, "çafé", kind)
        elif kind.names:
            array = np.zeros(count, kind)
            array["f0"] = np.arange(count)
        elif kind.kind == "b":
            array = (array % 2).astype(bool)
        else:
            array = array.view(kind)
        array = array.reshape(shape)
        back = way((array,))[0]
        assert (type(back), back.dtype, back.shape) == (np.ndarray, kind, shape)
        assert back.tobytes() == array.tobytes()
        assert back.flags.writeable


@pytest.mark.parametrize("way", WAYS)
def test_arrays_with_any_strides_come_back_equal(way: Any) -> None:
    whole = np.arange(300.0 * 500).reshape(300, 500)
    for array in (
        whole[::-1],
        whole[:, ::-2],
        whole.T,
        np.asfortranarray(whole),
        np.broadcast_to(whole[0], (400, 500)),
        whole[10:20, 5:9],
    ):
        back = way(array)
        np.testing.assert_array_equal(back, array)
        assert back.dtype == array.dtype


READ_ONLY: list[Callable[[Any], Any]] = [
    lambda a: a,
    lambda a: a[::-2],
    lambda a: a[: len(a) // 2 * 2].reshape(2, -1).T,
]


@pytest.mark.parametrize("way", WAYS)
def test_a_read_only_array_arrives_writable_as_a_copy_does(way: Any) -> None:
    for view, size in product(READ_ONLY, (0, 3, 100_000)):
        array = view(np.frombuffer(np.arange(size, dtype=np.int64).tobytes(), np.int64))
        assert not array.flags.writeable
        back = way([array, {"again": array}])
        np.testing.assert_array_equal(back[0], array)
        assert back[0] is back[1]["again"]
        assert back[0].flags.writeable
        back[0][...] = 7
        unchanged = view(np.arange(size, dtype=np.int64))
        np.testing.assert_array_equal(array, unchanged)  # that of the sender is its own


# -- what is around them ---------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_what_is_made_on_the_spot_goes_by_cloudpickle_and_keeps_its_buffers_apart(way: Any) -> None:
    class Local:
        def __init__(self, x: Any) -> None:
            self.x = x

    whole = torch.arange(100_000)
    header, _ = pack([Local(whole), Local(whole[3:])])
    assert len(header) < 10_000
    first, second = way([Local(whole), Local(whole[3:])])
    assert torch.equal(second.x, whole[3:])
    first.x[3] = -1
    assert second.x[0] == -1
    add = whole.numpy()[:50_000]
    assert way(lambda x: x + add)(1).tolist() == (add + 1).tolist()


def test_what_can_not_be_pickled_is_named() -> None:
    with pytest.raises(ResultPicklingError, match="generator"):
        pack([(each for each in "abc")])


@pytest.mark.parametrize(
    ("size", "apart"), [(IN_BAND - 1, False), (IN_BAND, True)], ids=["below", "at"]
)
def test_small_buffers_stay_in_the_header(size: int, apart: bool) -> None:
    for make in (torch.from_numpy, np.asarray):
        _, buffers = pack((make(np.zeros(size, np.uint8)), make(np.zeros(64, np.int64))))
        assert [buffer.nbytes for buffer in buffers] == ([size] if apart else [])


@pytest.mark.parametrize("own", [IN_BAND, OWN], ids=["shared slot", "own slot"])
def test_who_keeps_the_labels_does_not_keep_the_images(own: int) -> None:
    pair = writer_and_reader()
    batch = through_slots((torch.zeros(own, dtype=torch.uint8), torch.arange(64)), pair)
    labels = batch[1]
    assert pair[1].returned() == []  # the images live
    del batch
    gc.collect()
    assert len(pair[1].returned()) == 1
    assert torch.equal(labels, torch.arange(64))
    pair[0].close()


# -- the pickler that is kept ----------------------------------------------------------------------


class Nested:
    """Packs something else while it is packed."""

    def __reduce__(self) -> Any:
        return unpack, pack(np.arange(3))


class Failing:
    def __reduce__(self) -> Any:
        raise RuntimeError("no")


def test_nothing_of_a_value_is_left_in_the_pickler_or_in_the_next_value() -> None:
    shared = np.arange(5)
    references = sys.getrefcount(shared)  # one less since Python 3.14
    for value in ([shared, torch.arange(3)], torch.arange(3).expand(2, 3), Failing, None):
        if value is Failing:
            with pytest.raises(ResultPicklingError, match="no"):
                pack([torch.ones(2), Failing()])
        else:
            pack(value)
    for _ in range(2):
        assert pickle.loads(pack([shared, shared])[0])[1].tolist() == [0, 1, 2, 3, 4]
    assert sys.getrefcount(shared) == references
    assert unpack(*pack([Nested(), "after"]))[0].tolist() == [0, 1, 2]


class Named(torch.Tensor):
    name = ""


def test_a_subclass_of_tensor_whose_registered_way_sends_its_storage_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_storage(tensor: Named) -> Any:  # as MONAI's `reduce_meta_tensor`
        return list, ((tensor.untyped_storage(), vars(tensor)),)

    monkeypatch.setitem(ForkingPickler._extra_reducers, Named, with_storage)
    tensor = torch.arange(3.0).as_subclass(Named)
    tensor.name = "three"
    found = unpack(*pack(tensor))
    assert (type(found), found.name, found.tolist()) == (Named, "three", [0.0, 1.0, 2.0])


def test_a_way_that_is_registered_later_counts_from_then_on() -> None:
    pack([Color.RED])
    copyreg.pickle(Color, lambda color: (str, ("registered",)))  # type: ignore[arg-type]
    try:
        assert unpack(*pack([Color.RED])) == ["registered"]
    finally:
        del copyreg.dispatch_table[Color]
    assert unpack(*pack([Color.RED])) == [Color.RED]


@pytest.mark.skipif(
    not GIL and sys.version_info < (3, 14),
    reason="free-threaded Python 3.13 frees no class of a process that has started a thread",
)
def test_classes_that_are_made_on_the_way_are_not_kept_for_ever() -> None:
    def made() -> Any:
        return type("Made", (), {"__reduce_ex__": lambda self, protocol: (str, ("made",))})

    kind = made()
    first = weakref.ref(kind)
    for _ in range(1100):
        assert unpack(*pack(kind())) == "made"
        kind = made()
    gc.collect()
    assert first() is None
