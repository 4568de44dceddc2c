"""Crops of volumes: transforms that never change are cached, random ones run in each epoch.

    python examples/cookbook/medical.py [--volumes N] [--size N] [--rounds N]

It writes NIfTI files with a tumor each, trains on crops of them, and compares loaders.
"""

# needs: monai nibabel

import argparse
import copy
import os
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import monai.data
import nibabel
import numpy as np
import torch
from monai.data import list_data_collate
from monai.transforms import (
    Compose,
    EnsureTyped,
    FgBgToIndicesd,
    LoadImaged,
    NormalizeIntensityd,
    RandAffined,
    RandCropByPosNegLabeld,
    RandFlipd,
    RandGaussianNoised,
    SelectItemsd,
    Spacingd,
)

from hybridloader import Pipeline, rng

CROP, CROPS, BATCH, SPACING = 32, 4, 2, 1.2
KEYS = ("image", "label")


def write(folder, volumes, size):
    """Write scans of 1.5 mm voxels with a ball in each; return the paths."""
    draw = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(*3 * [np.arange(size)], indexing="ij"))
    cases = []
    for number in range(volumes):
        center = draw.integers(size // 4, 3 * size // 4, size=3)
        label = (
            ((grid - center[:, None, None, None]) ** 2).sum(0) < (size // 8) ** 2
        ).astype("u1")
        image = (draw.normal(size=label.shape) * 40 + label * 60).astype("i2")
        case = {key: str(folder / f"{key}-{number}.nii.gz") for key in KEYS}
        for key, volume in zip(KEYS, (image, label), strict=True):
            nibabel.save(
                nibabel.Nifti1Image(volume, np.diag([1.5, 1.5, 1.5, 1])), case[key]
            )
        cases.append(case)
    return cases


def deterministic(spacing):
    """Return transforms with the same result each time: read, resample, list voxels for crops."""
    return [
        LoadImaged(KEYS, ensure_channel_first=True),
        Spacingd(KEYS, pixdim=[spacing] * 3, mode=("bilinear", "nearest")),
        NormalizeIntensityd("image"),
        FgBgToIndicesd("label"),
        # Plain tensors: cheaper to send and to crop
        EnsureTyped(KEYS, track_meta=False),
    ]


@dataclass
class Prepare:
    """The deterministic transforms; the cache file records the repr."""

    spacing: float

    def setup(self):
        self.transform = Compose(deterministic(self.spacing))

    def __call__(self, case):
        return self.transform(case)


crop = RandCropByPosNegLabeld(
    KEYS,
    label_key="label",
    spatial_size=[CROP] * 3,
    num_samples=CROPS,
    fg_indices_key="label_fg_indices",
    bg_indices_key="label_bg_indices",
)
augment = Compose(
    [
        RandFlipd(KEYS, prob=0.5, spatial_axis=0),
        RandAffined(
            KEYS, prob=0.8, rotate_range=[0.3] * 3, mode=("bilinear", "nearest")
        ),
        RandGaussianNoised("image", prob=0.5),
        EnsureTyped(KEYS, track_meta=False),
    ]
)


class Random:
    """A random transform of MONAI, seeded for each item; each worker has a copy."""

    def __init__(self, transform):
        self.transform = transform

    def setup(self):
        # A draw is kept in the transform
        self.transform = copy.deepcopy(self.transform)

    def __call__(self, sample):
        self.transform.set_random_state(seed=int(rng().numpy.integers(2**32)))
        return self.transform(sample)


class Crops(Random):
    """Crops of one volume: copies, since a view would keep the volume."""

    def __call__(self, sample):
        return [
            {key: each[key].clone() for key in KEYS}
            for each in super().__call__(sample)
        ]


def pipeline(cases, backend, cache=None):
    return (
        Pipeline.from_dataset(cases)
        .map(Prepare(SPACING), backend="threads", num_workers=2)
        .cache(cache)
        .shuffle(len(cases), seed=0)
        .flat_map(Crops(crop), seeding="sample", backend="threads", num_workers=1)
        .map(Random(augment), seeding="sample", backend=backend, num_workers=2)
        .batch(BATCH * CROPS, collate_fn=list_data_collate)
    )


def train(pipe, epochs):
    model = torch.nn.Conv3d(1, 1, 5, padding=2)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    with pipe.epochs(epochs, seed=0) as runs:
        for number, run in enumerate(runs):
            for batch in run:
                found = model(batch["image"])
                loss = torch.nn.functional.binary_cross_entropy_with_logits(
                    found, batch["label"]
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(
                f"epoch {number}: loss {loss.item():.3f}, crops of {tuple(found.shape)}"
            )


def same_crops(cases, cache):
    """Return whether processes and threads make the same batches."""
    runs = [
        pipeline(cases, backend, cache).run(epoch=1, seed=0)
        for backend in ("fork", "threads")
    ]
    pairs = zip(*runs, strict=True)
    return all(
        torch.equal(left[key], right[key]) for left, right in pairs for key in KEYS
    )


def cpu():
    """Return the seconds of CPU of this process and of its ended children."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def theirs(cases, cached):
    # One flat list: CacheDataset counts a Compose as random, and would cache nothing from there on.
    transform = Compose(
        [*deterministic(SPACING), crop, SelectItemsd(KEYS), *augment.transforms]
    )
    if cached:
        data = monai.data.CacheDataset(cases, transform, progress=False, num_workers=2)
    else:
        data = monai.data.Dataset(cases, transform)
    return monai.data.DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=2)


def compare(cases, rounds):
    variants = {
        "MONAI, Dataset": lambda: theirs(cases, cached=False),
        "MONAI, CacheDataset": lambda: theirs(cases, cached=True),
        "cache, augment in fork": lambda: pipeline(cases, "fork"),
        "cache, augment in threads": lambda: pipeline(cases, "threads"),
    }
    best = {}
    for _ in range(rounds):
        for name, make in variants.items():
            loader = None
            for epoch in ("first", "later"):
                start, busy = time.perf_counter(), cpu()
                loader = loader or make()  # CacheDataset reads the volumes here
                for _ in loader:
                    pass
                times = time.perf_counter() - start, cpu() - busy
                best[name, epoch] = [*map(min, times, best.get((name, epoch), times))]
    print(f"{'s/epoch':>8}  {'CPU s':>6}  epoch")
    for (name, epoch), (elapsed, busy) in best.items():
        print(f"{elapsed:8.2f}  {busy:6.2f}  {epoch}: {name}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--volumes", type=int, default=4)
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        cases = write(Path(name), arguments.volumes, arguments.size)
        torch.manual_seed(0)
        cache = os.path.join(name, "prepared.cache")
        train(pipeline(cases, "fork", cache), epochs=3)
        print("processes and threads make the same crops:", same_crops(cases, cache))
        compare(cases, arguments.rounds)


if __name__ == "__main__":
    main()
