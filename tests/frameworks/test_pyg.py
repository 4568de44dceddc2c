"""PyG: its loaders adopt ours by mixin, wherever the features are gathered.

Its own neighbor samplers need pyg-lib or torch-sparse, which have no wheels for every torch; the
sampler here is a plain one with PyG's interface, so what runs is PyG's loaders, not its samplers.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparison import same
from support.compat import is_ours
from support.seeded_training import LIKE_TORCHS_PROCESSES, WORKERS
from torch import Tensor

import hybridloader

pytest.importorskip("torch_geometric")
from torch_geometric.data import Data
from torch_geometric.loader import (
    DataLoader,
    DynamicBatchSampler,
    LinkNeighborLoader,
    NeighborLoader,
    NodeLoader,
    PrefetchLoader,
    RandomNodeLoader,
)
from torch_geometric.sampler import BaseSampler, SamplerOutput


class Nodes(NodeLoader, hybridloader.DataLoader):  # type: ignore[misc]
    """Loader as written on the page of PyG."""


class Neighbors(NeighborLoader, hybridloader.DataLoader):  # type: ignore[misc]
    pass


class Links(LinkNeighborLoader, hybridloader.DataLoader):  # type: ignore[misc]
    pass


class Graphs(DataLoader, hybridloader.DataLoader):  # type: ignore[misc]
    pass


class Parts(RandomNodeLoader, hybridloader.DataLoader):  # type: ignore[misc]
    pass


NODES, EDGES = 24, 96


def graph(features: int = 3) -> Data:
    drawn = torch.Generator().manual_seed(0)
    return Data(
        x=torch.rand(NODES, features, generator=drawn),
        y=torch.arange(NODES),
        edge_index=torch.randint(NODES, (2, EDGES), generator=drawn),
        edge_attr=torch.rand(EDGES, 2, generator=drawn),
    )


class OneHop(BaseSampler):  # type: ignore[misc]
    """Three of the edges that end in a node, drawn from torch's generator of the worker."""

    def __init__(self, data: Data) -> None:
        self.source, self.target = data.edge_index

    def sample_from_nodes(self, index: Any, **options: Any) -> SamplerOutput:
        return self._around(index.node, (index.input_id, index.time))

    def sample_from_edges(self, index: Any, neg_sampling: Any = None) -> SamplerOutput:
        ends = torch.cat([index.row, index.col])
        pairs = torch.arange(len(ends)).view(2, -1)
        return self._around(ends, (index.input_id, pairs, index.label, index.time))

    def _around(self, seeds: Tensor, metadata: Any) -> SamplerOutput:
        edges = []
        for seed in seeds:
            mine = (self.target == seed).nonzero().view(-1)
            edges.append(mine[torch.randperm(len(mine))[:3]])
        edge = torch.cat(edges)
        extra = self.source[edge].unique()
        node = torch.cat([seeds, extra[~torch.isin(extra, seeds)]])
        place = torch.zeros(NODES, dtype=torch.long)
        place[node.flip(0)] = torch.arange(len(node)).flip(0)
        row, col = place[self.source[edge]], place[self.target[edge]]
        return SamplerOutput(node=node, row=row, col=col, edge=edge, metadata=metadata)


def batches(kind: Any, *args: Any, epochs: int = 2, **options: Any) -> list[Any]:
    torch.manual_seed(5)
    loader = kind(*args, **options)
    try:
        return [batch.to_dict() for _ in range(epochs) for batch in loader]
    finally:
        loader._iterator = None


def sampled(kind: Any, data: Data, **options: Any) -> list[Any]:
    return batches(kind, data, OneHop(data), batch_size=5, shuffle=True, **options)


@pytest.mark.parametrize("filter_per_worker", [True, False])
def test_r13_batches_of_nodes_are_those_of_pygs_loader(filter_per_worker: bool) -> None:
    options: dict[str, Any] = {"num_workers": WORKERS, "filter_per_worker": filter_per_worker}
    wanted = sampled(NodeLoader, graph(), **options)
    for backend in LIKE_TORCHS_PROCESSES:
        same(sampled(Nodes, graph(), backend=backend, **options), wanted)
    assert [len(batch["input_id"]) for batch in wanted] == [5, 5, 5, 5, 4] * 2
    with hybridloader.install(backend="inline"):
        same(sampled(NodeLoader, graph(), **options), wanted)
        iterator = iter(NodeLoader(graph(), OneHop(graph()), **options))
        assert is_ours(iterator if filter_per_worker else iterator.iterator)
    # PyG calls `_reset` of the iterator that it wraps.
    options |= {"persistent_workers": True, "epochs": 3}
    wanted = sampled(NodeLoader, graph(), **options)
    gc.collect()
    same(sampled(Nodes, graph(), backend="fork", **options), wanted)


@pytest.mark.slow  # the worker imports PyG
def test_a_fresh_process_is_sent_the_loader_whose_method_collates() -> None:
    options = {"num_workers": 1, "filter_per_worker": True, "epochs": 1}
    wanted = sampled(NodeLoader, graph(), **options)
    same(sampled(Nodes, graph(), backend="spawn", **options), wanted)


def dynamic() -> Any:
    return DynamicBatchSampler(graphs(), max_num=12, mode="node", shuffle=True)


def hop(**options: Any) -> dict[str, Any]:
    found = {"num_neighbors": [3], "neighbor_sampler": OneHop(graph()), "shuffle": True}
    return {**found, **options}


def graphs() -> list[Data]:
    return [
        Data(x=torch.full((k, 2), float(k)), edge_index=torch.arange(k).expand(2, -1).contiguous())
        for k in range(1, 10)
    ]


ROWS: dict[str, tuple[Any, Any, Any, Callable[[], dict[str, Any]], list[str | None]]] = {
    "neighbors": (NeighborLoader, Neighbors, graph, lambda: hop(batch_size=6), ["fork", "inline"]),
    "links": (
        *(LinkNeighborLoader, Links, graph),
        lambda: hop(edge_label_index=graph().edge_index, batch_size=20),
        ["fork", "inline"],
    ),
    "graphs": (
        *(DataLoader, Graphs, graphs),
        lambda: {"batch_size": 4, "shuffle": True},
        [*LIKE_TORCHS_PROCESSES, "threads"],
    ),
    "a batch sampler of PyG": (
        *(DataLoader, Graphs, graphs),
        lambda: {"batch_sampler": dynamic()},
        ["threads"],
    ),
    "parts": (RandomNodeLoader, Parts, graph, lambda: {"num_parts": 4, "shuffle": True}, ["fork"]),
}


@pytest.mark.parametrize("name", ROWS)
def test_batches_are_pygs(name: str) -> None:
    theirs, ours, data, options, backends = ROWS[name]
    wanted = batches(theirs, data(), num_workers=WORKERS, **options())
    for backend in backends:
        got = batches(ours, data(), num_workers=WORKERS, backend=backend, **options())
        same(got, wanted)


def test_the_prefetch_loader_wraps_ours() -> None:
    data = graph()
    loader = Nodes(data, OneHop(data), batch_size=5, num_workers=WORKERS, backend="threads")
    got = [batch.input_id.tolist() for batch in PrefetchLoader(loader, device=torch.device("cpu"))]
    assert list(itertools.chain(*got)) == [*range(NODES)]
