"""webdataset: tar archives as named shards, resumed mid-epoch with other workers and ranks."""

import io
import itertools
import tarfile
from pathlib import Path

import webdataset
from torch.utils.data import IterableDataset

from hybridloader import DataLoader, Pipeline


class Archives(IterableDataset):
    """Samples of tar archives, each of which is read by one worker."""

    def __init__(self, urls):
        self.shard_names = list(urls)

    def read_shard(self, name, start):
        # No splitters: hybridloader divides the archives among ranks and workers.
        samples = webdataset.WebDataset(
            name,
            nodesplitter=None,
            workersplitter=None,
            shardshuffle=False,
            empty_check=False,
        )
        yield from itertools.islice(
            samples.decode().to_tuple("txt", "cls"), start, None
        )

    def __iter__(self):
        for name in self.shard_names:
            yield from self.read_shard(name, 0)


def make_archives():
    urls = []
    for shard in range(6):
        urls.append(f"shard-{shard}.tar")
        with tarfile.open(urls[-1], "w") as archive:
            for number in range(10 * shard, 10 * shard + 10):
                for suffix, text in (
                    ("txt", f"text {number}"),
                    ("cls", str(number % 7)),
                ):
                    member = tarfile.TarInfo(f"{number:04d}.{suffix}")
                    member.size = len(text)
                    archive.addfile(member, io.BytesIO(text.encode()))
    return urls


def main():
    urls = make_archives()
    loader = DataLoader(Archives(urls), 4, num_workers=2, backend="fork")
    batches = iter(loader)
    seen = [text for _ in range(5) for text in next(batches)[0]]
    state = loader.state_dict()
    del batches

    other = DataLoader(Archives(urls), 4, num_workers=3, backend="threads")
    other.load_state_dict(state)
    seen += [text for batch in other for text in batch[0]]
    assert sorted(seen) == sorted(f"text {number}" for number in range(60))
    print(f"{len(seen)} samples, each once, on 2 workers and then on 3")

    words = Pipeline.from_iterable(Archives(urls), backend="threads", num_workers=3)
    words = words.flat_map(lambda sample: sample[0].split()).batch(8, collate_fn=list)
    print(sum(len(batch) for batch in words), "words from a pipeline")
    for url in urls:
        Path(url).unlink()


if __name__ == "__main__":
    main()
