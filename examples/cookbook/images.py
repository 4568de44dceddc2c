"""Photographs in folders to batches, by albumentations or torchvision:
python examples/cookbook/images.py [DIR] [--transforms torchvision] [--images N] [--rounds N]

DIR holds one folder of JPEG files for each class. Without it, the script makes one.
"""
# needs: albumentations cv2 PIL skimage sklearn

import argparse
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import albumentations as A
import cv2
import torch

from hybridloader import DataLoader, SampleSeeding
from hybridloader.sources import PerWorker

cv2.setNumThreads(0)  # the workers are the parallelism

SIZE = 224


def compose():
    return A.Compose(
        [
            A.RandomResizedCrop((SIZE, SIZE), scale=(0.3, 1.0)),
            A.HorizontalFlip(),
            A.ColorJitter(0.2, 0.2, 0.2, 0.0),
            A.ToTensorV2(),
        ]
    )


class Albumentations:
    """A `Compose` keeps generators and other state, so each worker makes one."""

    def __init__(self):
        self.compose = PerWorker(compose)

    def __call__(self, image):
        transform = self.compose()
        transform.set_random_seed(random.getrandbits(32))
        return transform(image=image)["image"]


class Torchvision:
    """torchvision draws from torch's generator, seeded for each sample."""

    def __init__(self):
        from torchvision.transforms import v2

        self.transform = v2.Compose(
            [
                v2.ToImage(),
                v2.RandomResizedCrop(SIZE, scale=(0.3, 1.0), antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ColorJitter(0.2, 0.2, 0.2, 0.0),
                v2.ToPureTensor(),
            ]
        )

    def __call__(self, image):
        return self.transform(image)


class Photos(torch.utils.data.Dataset):
    def __init__(self, folder, transform):
        self.classes = sorted(
            path.name for path in Path(folder).iterdir() if path.is_dir()
        )
        self.files = [
            (str(path), label)
            for label, name in enumerate(self.classes)
            for path in sorted(Path(folder, name).glob("*.jpg"))
        ]
        self.transform = transform

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, label = self.files[index]
        image = cv2.imread(path, cv2.IMREAD_COLOR_RGB)
        if image is None:
            raise ValueError(f"{path} is no image")
        return self.transform(image), label


def train_loader(photos, backend="threads"):
    return DataLoader(
        photos,
        batch_size=32,
        shuffle=True,
        drop_last=True,
        num_workers=2,  # as many as cores
        backend=backend,
        seeding=SampleSeeding(seed=0),
    )


MEAN = torch.tensor([123.7, 116.3, 103.5]).reshape(3, 1, 1)
STD = torch.tensor([58.4, 57.1, 57.4]).reshape(3, 1, 1)


def normalized(images, device="cpu"):
    """Workers return bytes. The device makes them floats, four times as large."""
    return images.to(device, non_blocking=True).float().sub_(MEAN).div_(STD)


def epoch(loader):
    """Return the time of an image, its CPU time in all processes, and the sum of each batch."""
    sums, start, cpu = [], time.perf_counter(), sum(os.times()[:4])
    for images, _ in loader:
        sums.append(int(images.sum()))
        normalized(images)
    count = 32 * len(sums)
    return (
        (time.perf_counter() - start) / count,
        (sum(os.times()[:4]) - cpu) / count,
        sums,
    )


def make_folder(folder, count):
    """Cut `count` photographs of 500 x 375 pixels, the mean size of ImageNet, on threads."""
    from hybridloader.demo import PHOTOGRAPHS, photograph

    sources = {name: photograph(name) for name in PHOTOGRAPHS}

    def cut(number):
        name = list(sources)[number % len(sources)]
        source, chance = sources[name], random.Random(number)
        scale = chance.uniform(0.7, 1)
        width, height = source.width * scale, source.height * scale
        left, top = (
            chance.uniform(0, source.width - width),
            chance.uniform(0, source.height - height),
        )
        image = source.resize((500, 375), box=(left, top, left + width, top + height))
        image.save(Path(folder, name, f"{number:05d}.jpg"), quality=90)

    for name in sources:
        Path(folder, name).mkdir()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(cut, range(count)))


def main(folder, transform, rounds):
    photos = Photos(folder, transform)
    print(f"{len(photos)} images of {len(photos.classes)} classes")

    loaders = {
        "threads": train_loader(photos, "threads"),
        "fork": train_loader(photos, "fork"),
        "torch's DataLoader": torch.utils.data.DataLoader(
            photos, 32, shuffle=True, drop_last=True, num_workers=2
        ),
    }
    times, sums = {name: [] for name in loaders}, {}
    for number in range(rounds):
        for name, loader in loaders.items():
            torch.manual_seed(number)  # the order of the epoch
            *taken, sums[name] = epoch(loader)
            times[name].append(taken)
    for name, taken in times.items():
        clock, cpu = map(min, zip(*taken, strict=True))
        print(
            f"{name}: {1 / clock:.0f} images a second, {1000 * cpu:.1f} ms of CPU an image"
        )
    print("threads and fork made the same batches:", sums["threads"] == sums["fork"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("folder", nargs="?", metavar="DIR")
    parser.add_argument("--transforms", choices=("albumentations", "torchvision"))
    parser.add_argument("--images", type=int, default=160, metavar="N")
    parser.add_argument("--rounds", type=int, default=1, metavar="N")
    options = parser.parse_args()
    transform = (
        Torchvision() if options.transforms == "torchvision" else Albumentations()
    )
    with TemporaryDirectory() as made:
        if options.folder is None:
            make_folder(made, options.images)
        main(options.folder or made, transform, options.rounds)
