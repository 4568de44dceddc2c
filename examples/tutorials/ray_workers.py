"""Decode images on a Ray cluster, lose a machine, and resume without the cluster.

    python examples/tutorials/ray_workers.py

The script starts a cluster of three machines on this one: a machine without free CPUs, which trains, and
two that decode images. One of the two is shut down in the middle of an epoch.
"""
# needs: ray PIL

import io
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from hybridloader import Pipeline, Ray

IMAGES, BATCH = 240, 8


def write_images(folder):
    """Write JPEG files. On a real cluster they lie in a folder that all machines can read."""
    random = np.random.default_rng(0)
    for number in range(IMAGES):
        small = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype="uint8"))
        small.resize((320, 240)).save(folder / f"{number:03d}.jpg")
    return sorted(folder.iterdir())


def decode(path):
    """Run on the cluster: the result is as small as it can be, uint8."""
    image = Image.open(io.BytesIO(path.read_bytes())).resize((64, 48))
    return int(path.stem), machine(), np.asarray(image)


def machine():
    """Return the machine of the cluster on which this function is called; '' outside of Ray."""
    import ray

    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""


def normalize(item):
    """Run beside the training: the result has four times as many bytes as its input."""
    number, where, pixels = item
    return number, where, pixels.astype(np.float32) / 255


def images(paths, backend):
    """Decode on `backend`, and the rest on threads of this machine."""
    return (
        Pipeline.from_dataset(paths, shuffle=True, seed=0)
        .map(decode, backend=backend, num_workers=2, on_worker_death="restart")
        .map(normalize, backend="threads", num_workers=1)
        .batch(BATCH)
    )


def start_cluster():
    """Return a cluster of three machines, which are processes here, and connect this process to it."""
    import ray
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **store})
    machines = [cluster.add_node(num_cpus=2, **store) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    cluster.wait_for_nodes()
    return cluster, machines


def main():
    import ray

    with tempfile.TemporaryDirectory() as folder:
        paths = write_images(Path(folder))
        expected = list(images(paths, "threads").run())

        cluster, machines = start_cluster()
        print(
            f"cluster of {len(ray.nodes())} machines, {ray.cluster_resources()['CPU']:.0f} CPUs"
        )
        found = []
        with images(paths, Ray(scheduling_strategy="SPREAD")).run(observe=True) as run:
            for batch in run:
                found.append(batch)
                if len(found) == 5:
                    used = {where for _, places, _ in found for where in places}
                    print(f"{len(found)} batches, decoded on {len(used)} machines")
                    lost = next(one for one in machines if one.node_id == batch[1][0])
                    cluster.remove_node(lost, allow_graceful=True)
                    print("one of these machines is shut down")
                if len(found) == 20:
                    break
            state = run.state_dict()
            restarted = sum(stage.faults.restarted for stage in run.stats().stages)
            print(
                f"{len(found)} batches, {restarted} worker restarted; the cluster is shut down"
            )
        ray.shutdown()
        cluster.shutdown()

        found += images(paths, "threads").run(state=state)
    print(f"{len(found)} batches, the rest decoded on threads")
    numbers = [number for batch in found for number in batch[0].tolist()]
    print("every image exactly once:", sorted(numbers) == [*range(IMAGES)])
    same = all(
        torch.equal(one[2], other[2])
        for one, other in zip(found, expected, strict=True)
    )
    print("the same batches as without a cluster:", same)


if __name__ == "__main__":
    main()
