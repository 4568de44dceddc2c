"""Crops and whole utterances of audio files, as spectrograms:
python examples/cookbook/audio.py [--format flac] [--files N] [--rounds N]

The script makes its files: utterances of 1 to 8 seconds and recordings of 30, at 48 kHz.
"""
# needs: soundfile

import argparse
import math
import os
import random
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import soundfile
import torch

from hybridloader import DataLoader, SampleSeeding
from hybridloader.pipeline import Pad
from hybridloader.sampling import TokenBudgetBatchSampler

RATE, TIMES = 16_000, 3
"""Rate that the model hears; the files have `TIMES` as many samples a second."""

WINDOW = torch.hann_window(400)


def resample(wave):
    """Keep the frequencies below half of `RATE`, as `scipy.signal.resample` does."""
    # A Fourier transform of a prime length is slow
    length = len(wave) // TIMES // 160 * 160
    spectrum = torch.fft.rfft(wave[: length * TIMES])
    return torch.fft.irfft(spectrum[: length // 2 + 1], length) / TIMES


def spectrogram(wave):
    """Return the logarithm of the power: 100 rows a second, of 201 frequencies."""
    spectrum = torch.stft(wave, 400, hop_length=160, window=WINDOW, return_complex=True)
    return spectrum.abs().square().clamp(min=1e-10).log10().T.contiguous()


def read_crop(path):
    with soundfile.SoundFile(path) as file:
        length = RATE * TIMES  # a second
        file.seek(random.randrange(file.frames - length + 1))  # the rest is not read
        return file.read(length, dtype="float32")


class Crops(torch.utils.data.Dataset):
    """A random second of each recording, `times` in an epoch."""

    def __init__(self, paths, times=1):
        self.paths = paths * times

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return spectrogram(resample(torch.from_numpy(read_crop(self.paths[index]))))


def loader_of_crops(crops, backend="threads"):
    seeding = SampleSeeding(seed=0)
    return DataLoader(
        crops, 16, shuffle=True, num_workers=2, backend=backend, seeding=seeding
    )


class Utterances(torch.utils.data.Dataset):
    def __init__(self, paths):
        self.paths = paths
        # Rows of each spectrogram; `info` reads the header only.
        self.lengths = [
            soundfile.info(path).frames // (160 * TIMES) + 1 for path in paths
        ]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        wave, _ = soundfile.read(self.paths[index], dtype="float32")
        return spectrogram(resample(torch.from_numpy(wave)))


def loader_of_utterances(utterances, batches, backend="threads"):
    """`batches` is a batch sampler, or a number of utterances a batch."""
    how = (
        {"batch_sampler": batches}
        if hasattr(batches, "__iter__")
        else {"batch_size": batches}
    )
    collate = Pad(padding_value=-10, lengths=True)  # silence
    return DataLoader(
        utterances, collate_fn=collate, num_workers=2, backend=backend, **how
    )


def make_file(path, seconds, seed):
    """Write a tone that slides, with noise."""
    chance = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE * TIMES)) / (RATE * TIMES)
    tone = np.sin(2 * math.pi * time * (chance.uniform(100, 400) + 40 * time))
    soundfile.write(
        path, 0.5 * tone + 0.01 * chance.standard_normal(len(time)), RATE * TIMES
    )
    return str(path)


def epoch(batches):
    """Return the time of a crop, and its CPU time in all processes."""
    count, start, cpu = 0, time.perf_counter(), sum(os.times()[:4])
    for batch in batches:
        count += len(batch)
    return (time.perf_counter() - start) / count, (sum(os.times()[:4]) - cpu) / count


def shortest(function, argument):
    """Return the milliseconds of CPU of the fastest of ten calls."""
    taken = []
    for _ in range(10):
        start = time.process_time()
        function(argument)
        taken.append(1000 * (time.process_time() - start))
    return min(taken)


def padding(batches):
    """Return the number of batches, and the share of their cells that is padding."""
    count = cells = used = 0
    for batch, lengths in batches:
        count, cells, used = (
            count + 1,
            cells + batch.shape[0] * batch.shape[1],
            used + lengths.sum(),
        )
    return count, 1 - float(used) / cells


def main(folder, format, files, rounds):
    chance = random.Random(0)
    spoken = Utterances(
        [
            make_file(
                Path(folder, f"{number:03d}.{format}"),
                1 + 7 * chance.random() ** 2,
                number,
            )
            for number in range(files)
        ]
    )
    recordings = [
        make_file(Path(folder, f"long{number}.{format}"), 30, number)
        for number in range(4)
    ]
    crops = Crops(recordings, times=files // 4)
    print(
        f"a second of a recording, by a seek: {shortest(read_crop, recordings[0]):.2f} ms"
    )
    read = partial(soundfile.read, dtype="float32")
    print(f"the whole recording: {shortest(read, recordings[0]):.2f} ms")

    samplers = {
        "16 utterances": 16,
        "80 seconds": TokenBudgetBatchSampler(spoken.lengths, max_cost=8000, seed=0),
    }
    for name, batches in samplers.items():
        count, share = padding(loader_of_utterances(spoken, batches))
        print(f"{name}: {count} batches, {100 * share:.0f} percent padding")

    loaders = {
        "crops, threads": loader_of_crops(crops, "threads"),
        "crops, fork": loader_of_crops(crops, "fork"),
        "crops, torch's DataLoader": torch.utils.data.DataLoader(
            crops, 16, num_workers=2
        ),
    }
    times = {name: [] for name in loaders}
    for _ in range(rounds):
        for name, loader in loaders.items():
            times[name].append(epoch(loader))
    for name, taken in times.items():
        clock, cpu = map(min, zip(*taken, strict=True))
        print(f"{name}: {1 / clock:.0f} a second, {1000 * cpu:.1f} ms of CPU for one")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--format", choices=("wav", "flac"), default="wav")
    parser.add_argument("--files", type=int, default=80, metavar="N")
    parser.add_argument("--rounds", type=int, default=1, metavar="N")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        main(folder, options.format, options.files, options.rounds)
