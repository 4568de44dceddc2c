"""Train from S3 on two ranks, stop, and resume: python examples/train_from_s3.py

A local server stands for S3. `write_shards` fills a bucket with shards and indices. Two ranks (gloo)
train a model on them: each reads blocks of its own ahead, and both share one cache on the local disk.
They stop in the middle of the epoch, save a checkpoint, and two new processes with other workers resume
from it. Together, all ranks have trained on each sample once.
Needs: pip install -e ".[files]" s3fs "moto[server]" (in the clone)
"""

import io
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hybridloader import DataLoader
from hybridloader.sampling import BlockShuffleSampler
from hybridloader.sources import Tar, write_shards

RANKS, SHARDS, SAMPLES, BATCH = 2, 8, 400, 10
"""Number of ranks, of shards, of all samples, and of samples in a batch of one rank."""

URL = "s3://training/digits"


def options_of(endpoint):
    """Options of s3fs. With a real bucket: {}, and credentials as boto3 finds them."""
    return {"endpoint_url": endpoint, "key": "key", "secret": "secret"}


def fill_bucket(endpoint):
    """Write the samples into the bucket: a tensor of 4 numbers, and the class."""
    import s3fs

    s3fs.S3FileSystem(**options_of(endpoint)).mkdir("training")
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(SAMPLES):
        values = torch.randn(4, generator=generator)
        label = int(values.sum() > 0)
        samples.append(
            {"__key__": f"{number:06d}", "npy": values.numpy(), "cls": label}
        )
    size = SAMPLES // SHARDS
    write_shards(
        samples, URL, samples_per_shard=size, storage_options=options_of(endpoint)
    )


def decode(sample):
    values = np.load(io.BytesIO(sample["npy"]))
    return int(sample["__key__"]), torch.from_numpy(values), int(sample["cls"])


def train(endpoint, folder, workers, stop_after):
    """Train in one rank, until `stop_after` batches or to the end; write the samples that were seen."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    samples = Tar(
        f"{URL}/",
        index="beside",  # as `write_shards` wrote it
        decode=decode,
        cache_dir=os.path.join(folder, "cache"),
        storage_options=options_of(endpoint),
    )
    # Number and count of the ranks are those of the process group.
    sampler = BlockShuffleSampler(
        samples, seed=0, block_size=25, window_blocks=4, num_canonical_ranks=RANKS
    )
    loader = DataLoader(
        samples, BATCH, sampler=sampler, num_workers=workers, backend="threads"
    )
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = Path(folder, "checkpoint.pt")
    if checkpoint.exists():
        found = torch.load(checkpoint)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        loader.load_state_dict(found["loader"])  # the same state on each rank
    seen = []
    with iter(loader) as batches:
        for step, (numbers, values, labels) in enumerate(batches, 1):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(values), labels)
            loss.backward()
            optimizer.step()
            seen += numbers.tolist()
            if step == stop_after:
                break
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state["loader"] = loader.state_dict()
    if rank == 0:
        torch.save(state, checkpoint)
    Path(folder, f"seen-{stop_after}-{rank}.json").write_text(json.dumps(seen))
    samples.close()
    dist.barrier()
    dist.destroy_process_group()


def launch(endpoint, folder, *, workers, stop_after):
    """Start the ranks, as torchrun does, and wait for them. Return the samples that they saw."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [
        sys.executable,
        __file__,
        endpoint,
        folder,
        str(workers),
        str(stop_after),
    ]
    ranks = []
    for rank in range(RANKS):
        environ = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        ranks.append(subprocess.Popen(command, env={**os.environ, **environ}))
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit("a rank failed")
    found = Path(folder).glob(f"seen-{stop_after}-*.json")
    return [number for path in found for number in json.loads(path.read_text())]


def main():
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    with tempfile.TemporaryDirectory() as folder:
        fill_bucket(endpoint)
        seen = launch(endpoint, folder, workers=2, stop_after=7)
        print(f"stopped after {len(seen)} samples")
        seen += launch(endpoint, folder, workers=1, stop_after=0)
    server.stop()
    assert sorted(seen) == [*range(SAMPLES)]
    print(f"and resumed to {len(seen)}: every sample once")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
