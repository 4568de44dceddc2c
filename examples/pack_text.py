"""Write documents into shards, mix two sources, pack them into rows, stop and resume:
python examples/pack_text.py

Documents of two sources are written into Parquet shards. A pipeline shuffles each, tokenizes them on
threads, mixes them by weight and packs them into rows of one length. It stops after some batches;
another one resumes from its state. Together they made the batches of a run that was not stopped.
Needs: pip install -e ".[parquet]" (in the clone)
"""

import json
import os
import tempfile

import numpy as np
import pyarrow
import pyarrow.parquet
import torch

from hybridloader import Pipeline
from hybridloader.sources import Parquet

LENGTH, BATCH = 64, 4
"""Tokens of a row, and rows of a batch."""


def write_documents(path, name, numbers):
    rows = [{"text": f"{name} {number} " * (number % 11 + 1)} for number in numbers]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def tokenize(row):
    return np.frombuffer(row["text"].encode() + b"\0", np.uint8)


def pipeline(folder):
    web, books = (
        Pipeline.from_dataset(Parquet(f"{folder}/{name}/"), shuffle=True, seed=0).map(
            tokenize, backend="threads", num_workers=2
        )
        for name in ("web", "books")
    )
    mixed = web.mix(books.repeat(), weights=[3, 1], seed=0, stop="first")
    return mixed.pack(LENGTH, drop_last=True).batch(BATCH)


def main():
    with tempfile.TemporaryDirectory() as folder:
        for name, count in (("web", 300), ("books", 40)):
            os.mkdir(f"{folder}/{name}")
            for first in range(0, count, 100):
                numbers = range(first, min(first + 100, count))
                path = f"{folder}/{name}/{first:06d}.parquet"
                write_documents(path, name, numbers)
            print(f"{name}: {count} documents")
        whole = list(pipeline(folder).run())

        run = pipeline(folder).run()
        found = [next(run) for _ in range(20)]
        state = json.dumps(run.state_dict())
        run.close()
        print(
            f"stopped after {len(found)} of {len(whole)} batches, with a state of {len(state)} bytes"
        )
        found += pipeline(folder).run(state=json.loads(state))

    assert len(found) == len(whole)
    assert all(
        torch.equal(a[name], b[name])
        for a, b in zip(found, whole, strict=True)
        for name in a
    )
    segments = torch.cat([batch["segment_ids"] for batch in found])
    print(
        f"and resumed: the same {len(segments)} rows of {LENGTH} tokens, none of them padding"
    )
    assert segments.min() == 1


if __name__ == "__main__":
    main()
