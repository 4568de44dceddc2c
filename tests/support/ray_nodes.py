"""Program: a loader on a Ray cluster of three nodes on this machine, one of which is killed midway.

Prints the labels that came, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray
import torch
from ray._private.state import actors
from ray.cluster_utils import Cluster
from torch.utils.data import Dataset

from hybridloader import DataLoader, Ray


class Images(Dataset[Any]):
    def __len__(self) -> int:
        return 800

    def __getitem__(self, index: int) -> Any:
        return torch.full((50, 1000), index + 0.5), index


def main() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    store = {"object_store_memory": 100 << 20}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **store}
    )
    nodes = [cluster.add_node(num_cpus=2, **store) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    cluster.wait_for_nodes()
    try:
        loader = DataLoader(
            Images(),
            4,
            num_workers=2,
            # One on each node at first; both on the other one when theirs is gone.
            backend=Ray(num_cpus=1, scheduling_strategy="SPREAD"),
            on_worker_death="restart",
        )
        found: list[int] = []
        for count, (images, labels) in enumerate(loader):
            assert torch.equal(images[:, 0, 0], labels + 0.5)
            found += labels.tolist()
            if count == 20:
                cluster.remove_node(nodes[0], allow_graceful=False)
        rows = [row["Address"]["NodeID"] for row in actors().values()]
        print(json.dumps({"labels": found, "actors": len(rows), "nodes": len({*rows})}))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
