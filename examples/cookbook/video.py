"""Clips of videos by PyAV or torchcodec:
python examples/cookbook/video.py [--decoder torchcodec] [--gop N] [--frames N] [--rounds N]

The script makes its videos, with a keyframe every `--gop` frames.
"""
# needs: av

import argparse
import os
import time
from collections import OrderedDict
from functools import partial
from tempfile import TemporaryDirectory

import av
import numpy as np
import torch

from hybridloader import DataLoader, Pipeline
from hybridloader.sources import PerWorker

LENGTH = 16
"""Frames of a clip."""
SIZE = 112
"""Height and width of a returned frame."""


class PyAV:
    """One open video."""

    def __init__(self, path):
        self.container = av.open(path)
        self.stream = self.container.streams.video[0]
        self.stream.thread_type = "NONE"  # the workers are the parallelism
        # Between two frames
        self.ticks = 1 / (self.stream.average_rate * self.stream.time_base)

    def clip(self, first):
        start = round(first * self.ticks)
        self.container.seek(start, stream=self.stream)  # to the last keyframe before it
        frames = []
        for frame in self.container.decode(self.stream):
            if frame.pts < start:
                continue  # from the keyframe to the clip: decoded in vain
            frames.append(
                frame.to_ndarray(width=SIZE, height=SIZE, format="rgb24", threads=1)
            )
            if len(frames) == LENGTH:
                return np.stack(frames)
        raise ValueError(f"{self.container.name} ends within the clip at frame {first}")

    def close(self):
        self.container.close()


class TorchCodec:
    """The same by torchcodec, which uses the system's FFmpeg."""

    def __init__(self, path):
        from torchcodec.decoders import VideoDecoder
        from torchcodec.transforms import Resize

        resize = Resize((SIZE, SIZE))
        self.video = VideoDecoder(path, dimension_order="NHWC", transforms=[resize])

    def clip(self, first):
        return self.video.get_frames_in_range(first, first + LENGTH).data

    def close(self):
        pass


class OpenVideos:
    """The videos that one worker has open: at most `keep`."""

    def __init__(self, decoder, keep=4):
        self.decoder, self.keep = decoder, keep
        self.videos = OrderedDict()

    def __getitem__(self, path):
        if path not in self.videos:
            self.videos[path] = self.decoder(path)
            if len(self.videos) > self.keep:
                self.videos.popitem(last=False)[1].close()
        self.videos.move_to_end(path)
        return self.videos[path]

    def close(self):
        for video in self.videos.values():
            video.close()


def index(path):
    """Return the number of frames, and the numbers of the keyframes: reads packets, decodes none."""
    with av.open(path) as container:
        stream = container.streams.video[0]
        times = [
            (packet.pts, packet.is_keyframe)
            for packet in container.demux(stream)
            if packet.size
        ]
    return len(times), [number for number, (_, key) in enumerate(sorted(times)) if key]


class Clips(torch.utils.data.Dataset):
    """Clips of `LENGTH` frames that begin every `step` frames of every video."""

    def __init__(self, paths, decoder, step=LENGTH // 2):
        self.videos = PerWorker(partial(OpenVideos, decoder))
        self.clips, self.decoded = [], 0
        for path in paths:
            frames, keyframes = index(path)
            for first in range(0, frames - LENGTH + 1, step):
                self.clips.append((path, first))
                self.decoded += (
                    first + LENGTH - max(key for key in keyframes if key <= first)
                )

    def __len__(self):
        return len(self.clips)

    def __getitem__(self, number):
        path, first = self.clips[number]
        return self.videos()[path].clip(first), first


def random_clips(clips, backend="threads"):
    return DataLoader(clips, batch_size=8, shuffle=True, num_workers=2, backend=backend)


def all_clips(path):
    """Read a video from its beginning to its end: each frame is decoded once."""
    with av.open(path) as container:
        container.streams.video[0].thread_type = "NONE"
        frames = []
        for number, frame in enumerate(container.decode(video=0), start=1):
            frames.append(
                frame.to_ndarray(width=SIZE, height=SIZE, format="rgb24", threads=1)
            )
            if len(frames) == LENGTH:
                yield np.stack(frames), number - LENGTH
                # The next clip begins in the middle of this one
                frames = frames[LENGTH // 2 :]


def streamed_clips(paths):
    return (
        Pipeline.from_dataset(paths, shuffle=True, seed=0)
        .flat_map(all_clips, backend="threads", num_workers=2)
        .shuffle(64)
        .batch(8)
    )


def make(path, gop, frames, seed):
    """Write a moving pattern; ten squares at the top are the bits of the frame's number."""
    random = np.random.default_rng(seed)
    pattern = (
        random.integers(256, size=(80, 90, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    )
    options = {
        "g": str(gop),
        "keyint_min": str(gop),
        "sc_threshold": "0",
        "threads": "1",
    }
    with av.open(path, "w") as container:
        stream = container.add_stream(
            "libx264", rate=30, options=options | {"preset": "veryfast"}
        )
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        for number in range(frames):
            y, x = (
                int(200 + 150 * np.sin(number / 20)),
                int(200 + 150 * np.cos(number / 33)),
            )
            pixels = pattern[y : y + 240, x : x + 320].copy()
            for bit in range(10):
                pixels[:24, bit * 32 : (bit + 1) * 32] = 255 * (number >> bit & 1)
            container.mux(
                stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24"))
            )
        container.mux(stream.encode())


def number_of(frame):
    """Read the squares."""
    bits = [
        frame[5, round((bit + 0.5) * SIZE / 10)].float().mean() > 128
        for bit in range(10)
    ]
    return sum(1 << bit for bit, white in enumerate(bits) if white)


def epoch(batches):
    """Return the time of a clip, and its CPU time in all processes. Check the first frames."""
    count, start, cpu = 0, time.perf_counter(), sum(os.times()[:4])
    for clips, firsts in batches:
        count += len(clips)
        if [number_of(clip[0]) for clip in clips] != firsts.tolist():
            raise ValueError(f"these clips do not begin at {firsts.tolist()}")
    return (time.perf_counter() - start) / count, (sum(os.times()[:4]) - cpu) / count


def main(folder, decoder, gop, frames, rounds):
    paths = [f"{folder}/{number}.mp4" for number in range(4)]
    for number, path in enumerate(paths):
        make(path, gop, frames, seed=number)
    clips = Clips(paths, decoder)
    print(f"{len(paths)} videos of {frames} frames, a keyframe every {gop}")
    print(
        f"a random clip of {LENGTH} frames decodes {clips.decoded / len(clips):.1f} frames"
    )

    loaders = {
        "random, threads": random_clips(clips, "threads"),
        "random, fork": random_clips(clips, "fork"),
        "random, torch's DataLoader": torch.utils.data.DataLoader(
            clips, 8, shuffle=True, num_workers=2
        ),
        "streamed, threads": streamed_clips(paths),
    }
    times = {name: [] for name in loaders}
    for _ in range(rounds):
        for name, loader in loaders.items():
            times[name].append(epoch(loader))
    for name, taken in times.items():
        clock, cpu = map(min, zip(*taken, strict=True))
        print(
            f"{name}: {1 / clock:.0f} clips a second, {1000 * cpu:.1f} ms of CPU a clip"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--decoder", choices=("pyav", "torchcodec"))
    parser.add_argument("--gop", type=int, default=48, metavar="N")
    parser.add_argument("--frames", type=int, default=160, metavar="N")
    parser.add_argument("--rounds", type=int, default=1, metavar="N")
    options = parser.parse_args()
    decoder = TorchCodec if options.decoder == "torchcodec" else PyAV
    with TemporaryDirectory() as folder:
        main(folder, decoder, options.gop, options.frames, options.rounds)
