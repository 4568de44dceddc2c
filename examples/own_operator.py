"""A step of your own: windows of consecutive items, such as the frames of a clip."""

import math
from collections import deque
from dataclasses import dataclass

from hybridloader import Pipeline
from hybridloader.pipeline import Operator


@dataclass(frozen=True)
class Windows(Operator):
    """Tuples of `size` items in a row, which begin `stride` items apart."""

    size: int
    stride: int = 1

    def __post_init__(self):
        for name in ("size", "stride"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"windows: {name} must be at least 1, not {getattr(self, name)}"
                )

    def open(self, items, context):
        return WindowsIterator(items, self.size, self.stride)

    def length(self, upstream):
        if upstream is None or upstream == math.inf:
            return upstream
        return max(0, (upstream - self.size) // self.stride + 1)

    def seek(self, n):
        return n * self.stride  # items that no later window needs


class WindowsIterator:
    """A class, not a generator: a generator is over after the first exception that goes through it."""

    def __init__(self, items, size, stride):
        self.items, self.stride = items, stride
        self.window = deque(maxlen=size)
        self.missing = size  # items that are to come before the next window

    def __iter__(self):
        return self

    def __next__(self):
        while self.missing:
            # An error goes to your loop; the next call continues after it.
            self.window.append(next(self.items))
            self.missing -= 1
        self.missing = self.stride
        return tuple(self.window)

    def close(self):
        close = getattr(self.items, "close", None)
        if close is not None:
            close()


if __name__ == "__main__":
    frames = Pipeline.from_dataset(range(10)).map(str, backend="threads", num_workers=2)
    clips = frames.apply(Windows(4, stride=3))
    print(len(clips), "clips:", *map("-".join, clips))
