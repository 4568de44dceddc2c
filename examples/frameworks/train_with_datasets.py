"""HF datasets: a table, and a stream whose persistent workers see each new epoch."""

import torch
from datasets import Dataset, IterableDataset
from torch import nn

from hybridloader import DataLoader


def read(shards):
    for shard in shards:
        for k in range(20):
            x = (20 * shard + k) / 80
            yield {"x": [x], "y": [2 * x - 1]}


def train(loader, epochs):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for epoch in range(epochs):
        # Also sets the epoch of the dataset, if it has a `set_epoch`
        loader.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    rows = list(read(range(4)))
    table = Dataset.from_list(rows).with_format("torch")
    # Processes, as with torch
    loader = DataLoader(table, 8, shuffle=True, num_workers=2)
    print(f"a table, {len(loader)} batches: loss {train(loader, 3):.4f}")

    stream = IterableDataset.from_generator(read, gen_kwargs={"shards": list(range(4))})
    stream = stream.shuffle(seed=0, buffer_size=40).with_format("torch")
    loader = DataLoader(
        stream, 8, num_workers=4, persistent_workers=True, backend="threads"
    )
    print(f"a stream in {stream.num_shards} shards: loss {train(loader, 3):.4f}")


if __name__ == "__main__":
    main()
