"""Text for a language model: Parquet, a tokenizer, packed rows, resuming in the middle:
python examples/cookbook/text.py [--copies N] [--rounds N]

The text is the documentation that Python carries. The script trains a tokenizer on it.
"""
# needs: tokenizers pyarrow

import argparse
import json
import os
import time
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from hybridloader import Pipeline
from hybridloader.sampling import BlockShuffleSampler
from hybridloader.sources import Parquet

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism

LENGTH, ROWS = 512, 8
"""Tokens of a row, and rows of a batch."""
END = "<|end|>"


def documents(copies):
    """Return the paragraphs, a few at a time, as documents of different lengths."""
    for copy in range(copies):
        for topic, text in topics.items():
            paragraphs = text.split("\n\n")
            while paragraphs:
                count = 1 + (len(paragraphs) + copy) % 7
                yield {"topic": topic, "text": "\n\n".join(paragraphs[:count])}
                del paragraphs[:count]


def train_tokenizer(path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=[END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(topics.values(), trainer)
    tokenizer.save(path)


class Tokenize:
    """Token ids of some rows of the table, each with the end of the text."""

    def __init__(self, path):
        self.path = path

    def setup(self):
        self.tokenizer = Tokenizer.from_file(self.path)
        self.end = self.tokenizer.token_to_id(END)

    def __call__(self, rows):
        # Releases the GIL; `encode`, for a single text, does not.
        encoded = self.tokenizer.encode_batch_fast([row["text"] for row in rows])
        return [np.array([*text.ids, self.end], np.int32) for text in encoded]


def tokens(folder, tokenizer, **workers):
    table = Parquet(f"{folder}/*.parquet", columns=["text"])
    order = BlockShuffleSampler(table, seed=0, window_blocks=4)
    some = Pipeline.from_dataset(table, sampler=order).batch(32, collate_fn=list)
    return some.flat_map(Tokenize(tokenizer), **workers)


def batches(folder, tokenizer, backend="threads"):
    made = tokens(folder, tokenizer, backend=backend, num_workers=2)
    return made.pack(LENGTH, drop_last=True).batch(ROWS)


def same(found, wanted):
    return len(found) == len(wanted) and all(
        torch.equal(a[name], b[name])
        for a, b in zip(found, wanted, strict=True)
        for name in a
    )


def resume(folder, tokenizer):
    """Stop in the middle, and resume in other workers."""
    whole = list(batches(folder, tokenizer).run(seed=0))
    with batches(folder, tokenizer).run(seed=0) as run:
        found = [next(run) for _ in range(len(whole) // 2)]
        state = json.dumps(run.state_dict())
    with batches(folder, tokenizer, backend="fork").run(state=json.loads(state)) as run:
        found += run
    print(
        f"{len(whole)} batches; stopped after {len(whole) // 2}, the state has {len(state)} bytes"
    )
    print("resumed with the same batches:", same(found, whole))


class Documents(torch.utils.data.Dataset):
    """The same for torch's loader: it does not pack."""

    def __init__(self, folder, tokenizer):
        self.table = Parquet(f"{folder}/*.parquet", columns=["text"])
        self.tokenize = Tokenize(tokenizer)
        self.tokenize.setup()

    def __len__(self):
        return len(self.table)

    def __getitems__(self, indices):
        return self.tokenize([self.table[index] for index in indices])


def with_torch(folder, tokenizer):
    dataset = Documents(folder, tokenizer)
    order = BlockShuffleSampler(dataset.table, seed=0, window_blocks=4)
    return torch.utils.data.DataLoader(
        dataset, 32, sampler=order, num_workers=2, collate_fn=list
    )


def epoch(made):
    """Return the time of a token, and its CPU time in all processes."""
    count, start, cpu = 0, time.perf_counter(), sum(os.times()[:4])
    for batch in made:
        count += (
            batch["tokens"].numel() if isinstance(batch, dict) else sum(map(len, batch))
        )
    return (time.perf_counter() - start) / count, (sum(os.times()[:4]) - cpu) / count


def main(folder, copies, rounds):
    tokenizer = f"{folder}/tokenizer.json"
    train_tokenizer(tokenizer)
    rows = pyarrow.Table.from_pylist([*documents(copies)])
    folder = f"{folder}/text"
    os.mkdir(folder)
    firsts = range(0, len(rows), 100)
    for first in firsts:
        path = f"{folder}/{first:06d}.parquet"
        pyarrow.parquet.write_table(rows[first : first + 100], path)
    print(f"{len(rows)} documents in {len(firsts)} files")

    resume(folder, tokenizer)

    made = {
        "threads": batches(folder, tokenizer),
        "fork": batches(folder, tokenizer, backend="fork"),
        "no workers": tokens(folder, tokenizer)
        .pack(LENGTH, drop_last=True)
        .batch(ROWS),
        "torch's DataLoader, not packed": with_torch(folder, tokenizer),
    }
    times = {name: [] for name in made}
    for _ in range(rounds):
        for name, one in made.items():
            times[name].append(epoch(one))
    for name, taken in times.items():
        clock, cpu = map(min, zip(*taken, strict=True))
        print(
            f"{name}: {1 / clock:,.0f} tokens a second, {1e6 * cpu:.1f} us of CPU a token"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument(
        "--copies", type=int, default=1, metavar="N", help="of the text"
    )
    parser.add_argument("--rounds", type=int, default=1, metavar="N")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        main(folder, options.copies, options.rounds)
