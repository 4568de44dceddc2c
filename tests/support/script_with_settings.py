"""A script with settings and registries at its top, and the answers of a loader's workers about them.

``python script_with_settings.py METHOD FILE [keep]`` prints the answers of torch's workers and of ours,
as JSON. Each process that runs the top of the script adds a line to FILE. With "keep" it does not close
the file.
"""

from __future__ import annotations

import copyreg
import gc
import json
import multiprocessing
import os
import random
import sys
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

METHOD, LOG, *KEEP = sys.argv[1:]
TOPS = open(LOG, "a")  # noqa: SIM115
print(os.getpid(), file=TOPS, flush=True)
if not KEEP:
    TOPS.close()

REGISTRY: dict[str, type] = {}


def register(kind: type) -> type:
    REGISTRY[kind.__name__] = kind
    return kind


@register
class Point:
    way = "none"

    def __init__(self, x: Any) -> None:
        self.x = x


class ByCopyreg(Point):
    pass


class ByForkingPickler(Point):
    pass


def reduced(point: Point) -> Any:
    return rebuilt, (type(point), point.x)


def rebuilt(kind: type[Point], x: Any) -> Point:
    made = kind(x)
    made.way = "registered"
    return made


def together(points: list[Point], *, collate_fn_map: Any = None) -> list[Any]:
    return [point.x for point in points]


OWN_CALLS: list[int] = []


collations: Any = default_collate_fn_map
collations[Point] = together
# A lambda of the script is sent as a copy, which would count for itself.
collations[str] = lambda texts, *, collate_fn_map=None: OWN_CALLS.append(1)
copyreg.pickle(ByCopyreg, reduced)  # type: ignore[arg-type]
ForkingPickler.register(ByForkingPickler, reduced)

torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.set_num_threads(3)
torch.set_flush_denormal(True)
torch.multiprocessing.set_sharing_strategy("file_system")
np.seterr(divide="raise")
warnings.filterwarnings("ignore", "of the script")
os.environ["OF_SCRIPT"] = "set"
sys.path.append("/of/script")
gc.set_threshold(777)
random.seed(1)
DRAWN = random.random()
COUNTS = [1]
COUNTS.append(2)
FROM_INIT: list[int] = []


PROBES: dict[str, Callable[[], Any]] = {
    "default dtype": lambda: str(torch.tensor([0.5], device="cpu").dtype),
    "default device": lambda: str(torch.empty(0).device),
    "threads of torch": torch.get_num_threads,
    "denormals": lambda: float(torch.tensor([1e-310], device="cpu") * 1),
    "sharing strategy": torch.multiprocessing.get_sharing_strategy,
    "errors of numpy": np.geterr,
    "warnings": lambda: sum("of the script" in repr(one[1]) for one in warnings.filters),
    "environment": lambda: [os.environ.get("OF_SCRIPT"), os.environ.get("OF_GUARD")],
    "sys.path": lambda: sys.path.count("/of/script"),
    "sys.argv": lambda: sys.argv[1:],
    "garbage": lambda: [gc.get_threshold()[0], gc.isenabled()],
    "random": random.random,
    "random of numpy": lambda: float(np.random.random()),
    "random of torch": lambda: float(torch.rand((), device="cpu")),
    "drawn at the top": lambda: DRAWN,
    "changed at the top": lambda: COUNTS,
    "set by worker_init_fn": lambda: FROM_INIT,
    "start method": multiprocessing.get_start_method,
    "module": lambda: [__name__, Point.__module__, vars(sys.modules["__main__"])["Point"] is Point],
    "registry": lambda: [REGISTRY["Point"] is Point, len(REGISTRY)],
    "collate map": lambda: default_collate([ByCopyreg(1), ByCopyreg(2)]),
    "own entry of the collate map": lambda: [default_collate(["a"]), len(OWN_CALLS)],
}


class Probed(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.point = Point(3)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        if index:
            return (Point, ByCopyreg, ByForkingPickler)[index - 1](index)
        return {name: probe() for name, probe in PROBES.items()} | {
            "an object that was sent": isinstance(self.point, Point)
        }


def init(worker: int) -> None:
    FROM_INIT.append(worker)


def answers(loader: Any) -> dict[str, Any]:
    torch.manual_seed(5)
    made = loader(
        Probed(),
        batch_size=None,
        num_workers=1,
        worker_init_fn=init,
        multiprocessing_context=METHOD,
    )
    found, *points = made
    results = {f"result {type(point).__name__}": [point.x, point.way] for point in points}
    return {**found, **results, "class of results": isinstance(points[0], Point)}


if __name__ == "__main__":
    import hybridloader

    torch.set_default_device(None)
    os.environ["OF_GUARD"] = "set"
    loaders = torch.utils.data.DataLoader, hybridloader.DataLoader
    print(json.dumps([answers(loader) for loader in loaders]))
