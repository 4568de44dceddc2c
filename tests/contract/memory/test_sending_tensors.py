"""What a dataset holds, as it arrives in workers with a copy of their own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from support.failing_datasets import Samples
from torch.utils.data import Dataset

from hybridloader import DataLoader, Threads
from hybridloader.engine import Backend


class Subclass(torch.Tensor):
    pass


def _sparse() -> list[torch.Tensor]:
    eye = torch.eye(4)
    return [
        eye.to_sparse(),
        torch.sparse_coo_tensor(
            torch.zeros(2, 2, dtype=torch.int64), torch.ones(2), (3, 3), check_invariants=False
        ),
        eye.to_sparse_csr(),
        eye.to_sparse_csc(),
        eye.to_sparse_bsr((2, 2)),
        eye.to_sparse_bsc((2, 2)),
    ]


class AllKinds(Dataset[Any]):
    """Holds tensors of all kinds; an item is what has become of some of them."""

    def __init__(self) -> None:
        self.sparse = _sparse()
        self.private = torch.zeros(8)
        self.part = self.private[4:]
        self.plain = torch.zeros(4).share_memory_()
        self.leaf = torch.zeros(4).share_memory_().requires_grad_()
        self.conjugate = torch.full((4,), 1 + 2j).share_memory_().conj()
        self.negative = self.conjugate.imag
        self.parameter = torch.nn.Parameter(torch.zeros(4).share_memory_())
        self.subclass = torch.zeros(4).as_subclass(Subclass)
        self.subclass.share_memory_()
        self.values = torch.eye(4).to_sparse()
        self.values._values().share_memory_()
        self.storage = torch.zeros(4).share_memory_().untyped_storage()

    def shared(self) -> list[torch.Tensor]:
        return [
            self.plain,
            self.leaf.data,
            self.parameter.data,
            self.subclass,
            self.values._values(),
            torch.empty(0).set_(self.storage, 0, (4,)),
        ]

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        for tensor in self.shared():
            tensor[1] = 7
        self.private[5] = 3
        grads = [tensor.requires_grad for tensor in (self.plain, self.leaf, self.parameter)]
        kinds = [type(self.parameter).__name__, type(self.subclass).__name__]
        complexes = self.conjugate.tolist(), self.negative.tolist()
        return self.sparse, complexes, grads, kinds, self.part[1].item()


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta")
@pytest.mark.parametrize(
    "backend",
    ["spawn", Threads(copy_dataset=True), "inline"],
)
def test_tensors_keep_layout_type_grad_and_what_they_share(backend: str | Backend) -> None:
    dataset = AllKinds()
    loader = DataLoader(dataset, batch_size=None, num_workers=1, backend=backend)
    ((sparse, complexes, grads, kinds, seen),) = list(loader)
    for found, sent in zip(sparse, _sparse(), strict=True):
        assert found.layout is sent.layout
        assert torch.equal(found.to_dense(), sent.to_dense())
    assert not sparse[1].is_coalesced()
    assert complexes == [[1 - 2j] * 4, [-2.0] * 4]
    assert grads == [False, True, True]
    assert kinds == ["Parameter", "Subclass"]
    assert [tensor[1].item() for tensor in dataset.shared()] == [7] * 6
    assert seen == 3  # a view of a private tensor
    assert dataset.private[5] == 0  # which is a copy


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta")
def test_sparse_results_keep_their_layout_and_are_kept_by_nobody() -> None:
    """torch 2.13 keeps each that is loaded from a pickle, until something calls `torch.load`."""
    sparse: Any = Samples(lambda index: _sparse()[index].requires_grad_(), 6)
    loader = DataLoader(sparse, batch_size=None, num_workers=1, backend="fork")
    kept = weakref.WeakSet[torch.Tensor]()
    for found, sent in zip(loader, _sparse(), strict=True):
        assert found.layout is sent.layout
        assert found.requires_grad
        assert torch.equal(found.to_dense(), sent.to_dense())
        kept.add(found)
    del found
    gc.collect()
    assert not kept
