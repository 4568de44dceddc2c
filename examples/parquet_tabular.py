"""Train on the rows of Parquet files: python examples/parquet_tabular.py

Batches are dicts of tensors, one for each column. Row groups come in random order, and rows are shuffled
within a window of four of them, so each is decoded once an epoch.
Needs: pip install 'hybridloader[parquet]'
"""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import torch

from hybridloader import DataLoader
from hybridloader.sampling import BlockShuffleSampler
from hybridloader.sources import Parquet

FILES, ROWS, COLUMNS = 2, 20_000, 8


def write(folder):
    draw = np.random.default_rng(0)
    weights = draw.normal(size=COLUMNS)
    for number in range(FILES):
        x = draw.normal(size=(ROWS, COLUMNS)).astype(np.float32)
        columns = {f"x{i}": x[:, i] for i in range(COLUMNS)}
        columns["y"] = (x @ weights).astype(np.float32)
        columns["valid"] = draw.random(ROWS) < 0.9
        columns["note"] = [f"row {i}" for i in range(ROWS)]
        path = folder / f"part-{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2_000)


def main():
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        features = [f"x{i}" for i in range(COLUMNS)]
        rows = Parquet(
            folder,
            columns=[*features, "y"],
            filter=pyarrow.dataset.field("valid"),
            tensors=True,
        )
        loader = DataLoader(
            rows,
            256,
            sampler=BlockShuffleSampler(rows, seed=0, window_blocks=4),
            num_workers=2,
            backend="threads",
            collate_fn=Parquet.collate_fn,
        )
        model = torch.nn.Linear(COLUMNS, 1)
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        for epoch in range(3):
            for batch in loader:
                x = torch.stack([batch[name] for name in features], 1)
                loss = torch.nn.functional.mse_loss(model(x).squeeze(1), batch["y"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: {len(rows)} rows, loss {loss.item():.6f}")
        assert loss.item() < 1e-3


if __name__ == "__main__":
    main()
