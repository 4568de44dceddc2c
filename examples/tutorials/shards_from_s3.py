"""Tar shards in S3, read by two ranks; an exact resume on three.

    python examples/tutorials/shards_from_s3.py

A local server plays S3. The script writes tar shards into a bucket, indexes them once, trains for some
steps on two ranks, and stops. Three ranks resume from the checkpoint. All ranks record the samples that
they were trained on: each sample of the epoch exactly once.
"""
# needs: moto s3fs

import io
import json
import logging
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

SHARDS, SAMPLES, BATCH = 8, 400, 8
"""Number of shards, of all samples, and of samples in a batch of one rank."""

URL = "s3://training/digits/*.tar"


def write_shards():
    """Write archives with the names of webdataset: 000001.npy and 000001.cls are one sample."""
    import s3fs

    store = s3fs.S3FileSystem()
    store.mkdir("training")
    random = np.random.default_rng(0)
    for shard in range(SHARDS):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for number in range(shard, SAMPLES, SHARDS):
                values = random.normal(size=4).astype("float32")
                array = io.BytesIO()
                np.save(array, values)
                label = b"%d" % (values.sum() > 0)
                for name, data in (("npy", array.getvalue()), ("cls", label)):
                    member = tarfile.TarInfo(f"{number:06d}.{name}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        store.pipe_file(f"training/digits/{shard:04d}.tar", packed.getvalue())


def decode(sample):
    values = np.load(io.BytesIO(sample["npy"]))
    return int(sample["__key__"]), values, int(sample["cls"])


def train(stop_after):
    """Train on this rank until `stop_after` steps, or to the end of the epoch if it is 0."""
    import torch
    import torch.distributed as dist

    from hybridloader import DataLoader
    from hybridloader.sampling import BlockShuffleSampler
    from hybridloader.sources import Tar

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    samples = Tar(URL, decode=decode, index="idx", cache_dir="cache")
    sampler = BlockShuffleSampler(
        samples,
        seed=0,
        block_size=10,
        window_blocks=4,
        num_canonical_ranks=2,
    )
    loader = DataLoader(
        samples,
        batch_size=BATCH,
        sampler=sampler,
        num_workers=2,
        backend="threads",
        observe=True,
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    checkpoint = Path("checkpoint.pt")
    if checkpoint.exists():
        found = torch.load(checkpoint)
        model.load_state_dict(found["model"])
        loader.load_state_dict(found["loader"])  # the same state on every rank
    seen = []
    with iter(loader) as batches:
        for step, (numbers, values, labels) in enumerate(batches, 1):
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(values), labels).backward()
            # As DistributedDataParallel and SGD would
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.data -= 0.1 * parameter.grad / ranks
            seen += numbers.tolist()
            if step == stop_after:
                break
        state = loader.state_dict()
    if rank == 0:
        torch.save({"model": model.state_dict(), "loader": state}, checkpoint)
    report(rank, seen, loader.stats())
    samples.close()
    dist.barrier()
    dist.destroy_process_group()


def report(rank, seen, stats):
    """Write the numbers of the samples that this rank has seen; rank 0 prints counts of all ranks."""
    import torch.distributed as dist

    Path(f"seen-by-{rank}-of-{dist.get_world_size()}.json").write_text(json.dumps(seen))
    (store,) = stats.stores
    mine = len(seen), store.requests, store.hits
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if rank == 0:
        for number, counts in enumerate(ranks):
            text = "rank {}: {} samples; {} requests to S3, {} blocks from the cache"
            print(text.format(number, *counts), flush=True)


def launch(ranks, stop_after):
    """Start the ranks as torchrun does, and wait for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    print(f"\n{ranks} ranks, started as by torchrun", flush=True)
    processes = []
    for rank in range(ranks):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
        }
        variables |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, str(stop_after)]
        processes.append(subprocess.Popen(command, env={**os.environ, **variables}))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit("a rank failed")


def main():
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    # A real bucket needs none of these but the credentials.
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_shards()
        from hybridloader.sources import Tar

        samples = Tar(URL, index="idx")
        print(
            f"{len(samples)} samples in {len(samples.shard_names)} archives", flush=True
        )
        launch(ranks=2, stop_after=10)
        launch(ranks=3, stop_after=0)
        seen = Counter()
        for file in Path().glob("seen-by-*.json"):
            seen.update(json.loads(file.read_text()))
        os.chdir("/")
    server.stop()
    assert seen == Counter(range(SAMPLES))
    print(f"\nevery one of the {SAMPLES} samples exactly once")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(sys.argv[1]))
    else:
        main()
