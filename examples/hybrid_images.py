"""Each step of an image pipeline where it runs best: python examples/hybrid_images.py [DIR] [--images N]

Files are read on threads, because reading waits; decoded on threads, because Pillow releases the GIL for
it; augmented in processes, because the loop over rows holds it. DIR holds one folder of images for each
class; without it, the demo's ten photographs are cut and used.
"""

import argparse
import io
import math
import time
from pathlib import Path

import numpy as np
from PIL import Image

from hybridloader import Pipeline, get_worker_info


def read(item):
    path, label = item
    return path.read_bytes(), label


def decode(item):
    data, label = item
    image = Image.open(io.BytesIO(data)).convert("RGB").resize((256, 192))
    return np.asarray(image), label


class Augment:
    """Ripples, a crop and a mirror image at random, the ripples row by row in Python."""

    def setup(self):
        # Called once in every worker, on a copy of this object that is the worker's own.
        info = get_worker_info()
        self.random = np.random.default_rng(info.seed if info else None)

    def __call__(self, item):
        pixels, label = item
        height, width, _ = pixels.shape
        strength, phase = self.random.uniform(0, 4), self.random.uniform(0, math.tau)
        rippled = np.empty_like(pixels)
        for row in range(height):
            shift = round(strength * math.sin(phase + math.tau * row / 32))
            rippled[row] = np.roll(pixels[row], shift, axis=0)
        top, left = (
            self.random.integers(height - 160),
            self.random.integers(width - 160),
        )
        crop = rippled[top : top + 160, left : left + 160]
        if self.random.random() < 0.5:
            crop = crop[:, ::-1]
        return np.ascontiguousarray(crop), label


def photos(files, count):
    return (
        Pipeline.from_dataset(files, shuffle=True, seed=0)
        .take(count)
        .map(read, backend="threads", num_workers=4)
        .map(decode, backend="threads", num_workers=2)
        .map(Augment(), backend="spawn", num_workers=2)
        .batch(32)
    )


def main(folder, images=None):
    classes = sorted(path for path in Path(folder).iterdir() if path.is_dir())
    files = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted(name.iterdir())
    ]
    pipe = photos(files, images or len(files))
    print(pipe, end="\n\n")

    count, total, start = 0, 0.0, time.perf_counter()
    with pipe.run(observe=True) as run:
        for pixels, labels in run:
            count += len(labels)
            total += pixels.float().mean(dim=(1, 2)).sum(dim=0)
        stats = run.stats()
    seconds = time.perf_counter() - start
    red, green, blue = (total / count).tolist()
    print(f"{count:,} images in {seconds:.1f} s: {count / seconds:,.0f} a second")
    print(f"mean color: {red:.0f} {green:.0f} {blue:.0f}\n")
    print(stats)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument(
        "folder", nargs="?", metavar="DIR", help="one folder of images per class"
    )
    parser.add_argument(
        "--images", type=int, metavar="N", help="take so many; without it, all"
    )
    options = parser.parse_args()
    if options.folder is None:
        from hybridloader.demo import prepare

        options.folder = prepare()
    main(options.folder, options.images)
