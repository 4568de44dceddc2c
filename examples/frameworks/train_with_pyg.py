"""PyG: its loaders on hybridloader's engine; features are gathered in workers or in the caller."""

import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader, NodeLoader
from torch_geometric.sampler import BaseSampler, SamplerOutput

import hybridloader


class Nodes(NodeLoader, hybridloader.DataLoader):
    """NeighborLoader, LinkNeighborLoader and the others work in the same way."""


class Graphs(DataLoader, hybridloader.DataLoader):
    """Loader for datasets of many small graphs."""


class Neighbors(BaseSampler):
    """Edges that point to a node. If pyg-lib is installed, use PyG's NeighborSampler instead."""

    def __init__(self, data):
        self.source, self.target = data.edge_index

    def sample_from_nodes(self, index, **options):
        edge = torch.isin(self.target, index.node).nonzero().view(-1)
        others = self.source[edge].unique()
        node = torch.cat([index.node, others[~torch.isin(others, index.node)]])
        place = torch.full((int(node.max()) + 1,), -1)
        place[node] = torch.arange(len(node))
        ends = place[self.source[edge]], place[self.target[edge]]
        return SamplerOutput(node, *ends, edge, metadata=(index.input_id, index.time))

    def sample_from_edges(self, index, neg_sampling=None):
        raise NotImplementedError


def main():
    torch.manual_seed(0)
    count = 200
    x = torch.randn(count, 4)
    edges = torch.randint(count, (2, 1000))
    data = Data(x=x, edge_index=edges, y=(x.sum(1) > 0).float())
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-2)

    options = {
        "batch_size": 32,
        "shuffle": True,
        "num_workers": 2,
        "filter_per_worker": False,
    }
    loader = Nodes(data, Neighbors(data), backend="threads", **options)
    for epoch in range(3):
        for batch in loader:
            source, target = batch.edge_index
            around = torch.zeros_like(batch.x).index_add(0, target, batch.x[source])
            found = model(torch.cat([batch.x, around], 1)).squeeze(1)[
                : batch.batch_size
            ]
            loss = nn.functional.binary_cross_entropy_with_logits(
                found, batch.y[: len(found)]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")

    graphs = [
        Data(x=torch.randn(k, 2), edge_index=torch.zeros(2, 0).long())
        for k in range(1, 9)
    ]
    for batch in Graphs(graphs, batch_size=4, num_workers=2, backend="fork"):
        print(f"{batch.num_graphs} graphs, {batch.num_nodes} nodes")


if __name__ == "__main__":
    main()
