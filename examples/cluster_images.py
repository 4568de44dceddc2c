"""Image steps on a Ray cluster, the rest beside the training: python examples/cluster_images.py DIR

Files are read and decoded by Ray actors, on whatever machine has room; augmentation and batching stay on
local threads. DIR holds one folder of images for each class, and is there on every machine. Without a
cluster, one is started on this machine.
"""

import io
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

from hybridloader import Pipeline, Ray, get_worker_info


def read(item):
    path, label = item
    return path.read_bytes(), label


def decode(item):
    data, label = item
    image = Image.open(io.BytesIO(data)).convert("RGB").resize((256, 192))
    return np.asarray(image), label


class Mirror:
    def setup(self):
        info = get_worker_info()
        self.random = np.random.default_rng(info.seed if info else None)

    def __call__(self, item):
        pixels, label = item
        if self.random.random() < 0.5:
            pixels = pixels[:, ::-1]
        return np.ascontiguousarray(pixels), label


def photos(files):
    return (
        Pipeline.from_dataset(files, shuffle=True, seed=0)
        .map(read, backend=Ray(num_cpus=0.5, start=True), num_workers=1)
        .map(decode, backend=Ray(num_cpus=0.5, start=True), num_workers=2)
        .map(Mirror(), backend="threads", num_workers=2)
        .batch(32)
    )


def main(folder):
    classes = sorted(path for path in Path(folder).iterdir() if path.is_dir())
    files = [
        (path, number)
        for number, found in enumerate(classes)
        for path in found.iterdir()
    ]
    began, count = time.perf_counter(), 0
    with photos(files).run(observe=True) as run:
        for images, _ in run:
            count += len(images)
        print(run.stats())
    print(f"{count} images in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1])
