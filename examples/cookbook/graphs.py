"""Batches of small graphs, and of neighbors in one large graph.

    python examples/cookbook/graphs.py [--graphs N] [--nodes N] [--rounds N]

It makes random graphs, trains on both kinds of batches, and compares loaders.
"""

# needs: torch_geometric

import argparse
import resource
import time
from functools import partial

import numpy as np
import torch
import torch_geometric.loader
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv, global_mean_pool
from torch_geometric.sampler import BaseSampler, SamplerOutput

import hybridloader

FEATURES = 32


class Graphs(torch_geometric.loader.DataLoader, hybridloader.DataLoader):
    """PyG's batches of many graphs, hybridloader's workers."""


class Nodes(torch_geometric.loader.NodeLoader, hybridloader.DataLoader):
    """PyG's batches of sampled neighbors, hybridloader's workers."""


class Molecules(torch.utils.data.Dataset):
    """Small graphs with random-walk features, computed for each graph when it is read."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draw = np.random.default_rng(index)
        nodes = int(draw.integers(10, 40))
        edges = draw.integers(nodes, size=(2, 3 * nodes))
        edges = np.concatenate([edges, edges[::-1]], 1)
        walk = np.zeros((nodes, nodes), np.float32)
        walk[edges[1], edges[0]] = 1
        walk /= walk.sum(1, keepdims=True).clip(1)
        powers, back = np.eye(nodes, dtype=np.float32), []
        for _ in range(FEATURES):
            powers = powers @ walk
            back.append(powers.diagonal())
        x = torch.from_numpy(np.stack(back, 1))
        y = x[:, 2].mean(0, keepdim=True)  # the share of triangles
        return Data(x=x, edge_index=torch.from_numpy(edges), y=y)


class Neighbors(BaseSampler):
    """Up to `sizes` neighbors of each node, layer by layer, drawn with replacement.

    It stands for PyG's NeighborSampler, which needs pyg-lib or torch-sparse.
    """

    def __init__(self, data, sizes):
        order = data.edge_index[1].argsort(stable=True)
        self.sources = data.edge_index[0][order]
        degrees = data.edge_index[1].bincount(minlength=data.num_nodes)
        self.starts = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
        self.sizes = sizes

    def sample_from_nodes(self, index, **options):
        nodes = frontier = index.node
        heads, tails = [], []
        for size in self.sizes:
            first, degree = (
                self.starts[frontier],
                self.starts[frontier + 1] - self.starts[frontier],
            )
            frontier, first, degree = (
                each[degree > 0] for each in (frontier, first, degree)
            )
            place = (torch.rand(len(frontier), size) * degree[:, None]).long() + first[
                :, None
            ]
            found = self.sources[place]
            heads.append(frontier.repeat_interleave(size))
            tails.append(found.flatten())
            frontier = found.unique()
            nodes = torch.cat([nodes, frontier[~torch.isin(frontier, nodes)]])
        # The number of a node within the batch; the first ones are those that were asked for.
        known, order = nodes.sort()
        row, col = (
            order[torch.searchsorted(known, torch.cat(each))] for each in (tails, heads)
        )
        return SamplerOutput(
            nodes, row, col, None, metadata=(index.input_id, index.time)
        )

    def sample_from_edges(self, index, neg_sampling=None):
        raise NotImplementedError


def large_graph(nodes):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(nodes, FEATURES, generator=draw)
    edges = torch.randint(nodes, (2, 15 * nodes), generator=draw)
    return Data(x=x, edge_index=edges, y=(x[:, 0] > 0).float())


class Model(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first, self.second = layer(FEATURES, 32), layer(32, 32)
        self.last = torch.nn.Linear(32, 1)

    def forward(self, x, edges, batch=None):
        x = self.second(self.first(x, edges).relu(), edges)
        return self.last(x if batch is None else global_mean_pool(x, batch)).squeeze(1)


def train(name, loader, model, loss_of):
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for batch in loader:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{name}: {len(loader)} batches, last loss {loss.item():.4f}")


def loss_of_graphs(model, batch):
    return torch.nn.functional.mse_loss(
        model(batch.x, batch.edge_index, batch.batch), batch.y
    )


def loss_of_nodes(model, batch):
    # The nodes that were asked for
    found = model(batch.x, batch.edge_index)[: batch.batch_size]
    return torch.nn.functional.binary_cross_entropy_with_logits(
        found, batch.y[: len(found)]
    )


def cpu():
    """Return the seconds of CPU of this process and of its ended children."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def compare(title, variants, rounds):
    best = {}
    for _ in range(rounds):
        for name, loader in variants.items():
            start, busy = time.perf_counter(), cpu()
            count = sum(1 for _ in loader)
            times = (time.perf_counter() - start) / count, (cpu() - busy) / count
            best[name] = [*map(min, times, best.get(name, times))]
    print(f"\n{'ms/batch':>8}  {'CPU ms':>8}  {title}")
    for name, (elapsed, busy) in best.items():
        print(f"{elapsed * 1e3:8.2f}  {busy * 1e3:8.2f}  {name}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--graphs", type=int, default=640)
    parser.add_argument("--nodes", type=int, default=5120)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(0)

    graphs = Molecules(arguments.graphs)
    small = {"batch_size": 64, "shuffle": True, "num_workers": 2}
    loader = Graphs(graphs, backend="fork", **small)
    train("graphs", loader, Model(GCNConv), loss_of_graphs)

    data = large_graph(arguments.nodes)
    nodes = {"batch_size": 512, "shuffle": True, "num_workers": 2}
    sampler = Neighbors(data, sizes=(10, 5))
    loader = Nodes(data, sampler, backend="threads", filter_per_worker=True, **nodes)
    train("nodes", loader, Model(SAGEConv), loss_of_nodes)

    theirs = torch_geometric.loader.DataLoader
    variants = {"PyG's loader": theirs(graphs, **small)}
    for backend in ("fork", "threads"):
        variants[backend] = Graphs(graphs, backend=backend, **small)
    compare("batches of graphs", variants, arguments.rounds)

    theirs = partial(torch_geometric.loader.NodeLoader, data, sampler, **nodes)
    variants = {"PyG's loader": theirs()}
    variants["PyG's loader, features gathered in workers"] = theirs(
        filter_per_worker=True
    )
    for backend in ("fork", "threads"):
        loader = Nodes(data, sampler, backend=backend, filter_per_worker=True, **nodes)
        variants[f"{backend}, features gathered in workers"] = loader
    compare("batches of neighbors", variants, arguments.rounds)


if __name__ == "__main__":
    main()
