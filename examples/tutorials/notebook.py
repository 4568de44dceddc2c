"""Loading in a notebook with fresh worker processes: python examples/tutorials/notebook.py

The script writes the cells below to notebook.ipynb in the current folder, runs them, presses Interrupt
in one of them, and prints their outputs. docs/tutorials/notebook.md explains them.
"""

# needs: nbclient ipykernel

import asyncio
import subprocess

import nbclient
import nbformat

CELLS = """
# Cell 1: a dataset of this notebook
import numpy as np
import torch


class Discs:
    def __init__(self, count, transform):
        self.count = count
        self.transform = transform

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        radius = 10 + index % 50
        y, x = np.ogrid[-64:64, -64:64]
        image = (x * x + y * y < radius * radius).astype(np.float32)
        return self.transform(image), radius


# Cell 2: torch's loader, as on macOS and Windows (raises)
def half(image):
    return image / 2


loader = torch.utils.data.DataLoader(
    Discs(256, half), 32, num_workers=1, multiprocessing_context="spawn"
)
images, radii = next(iter(loader))


# Cell 3: hybridloader's loader
from hybridloader import DataLoader

contrast = 2.0
discs = Discs(256, lambda image: image * contrast)
loader = DataLoader(discs, 32, shuffle=True, num_workers=2, backend="spawn")
for images, radii in loader:
    pass
print(tuple(images.shape), "brightest:", images.max().item())


# Cell 4: a line of progress
import time

from IPython.display import Pretty, display

line = display(Pretty("waiting for the first batch"), display_id=True)
loader = DataLoader(
    discs, 32, shuffle=True, num_workers=2, backend="spawn", observe=True
)
for number, (images, radii) in enumerate(loader, 1):
    time.sleep(0.02)  # the training step
    if number % 4 == 0:
        stats = loader.stats()
        rate, stall = stats.items / stats.seconds, stats.stall.share
        line.update(
            Pretty(f"{stats.items} batches, {rate:.0f} a second, waited {stall:.0%}")
        )


# Cell 5: a long epoch, and the Interrupt button (raises)
discs = Discs(1_000_000, lambda image: image * contrast)
loader = DataLoader(discs, 32, shuffle=True, num_workers=2, backend="spawn")
for number, (images, radii) in enumerate(loader):
    if number == 10:
        print("batch 10: press Interrupt")


# Cell 6: the workers after Interrupt
import multiprocessing

print("workers:", multiprocessing.active_children())


# Cell 7: a class of a later cell
class RelativeDiscs(Discs):
    def __getitem__(self, index):
        image, radius = super().__getitem__(index)
        return image, radius / 64


discs = RelativeDiscs(256, lambda image: image * contrast)
loader = DataLoader(discs, 32, shuffle=True, num_workers=2, backend="spawn")
images, radii = next(iter(loader))
print("radii below 1:", bool((radii < 1).all()))


# Cell 8: the memory of a batch (reads /proc, so Linux only)
def mapping(tensor):
    with open("/proc/self/maps") as entries:
        for entry in entries:
            addresses, _, _, _, _, *name = entry.split()
            first, last = (int(address, 16) for address in addresses.split("-"))
            if first <= tensor.data_ptr() < last:
                return " ".join(name)


print("the images are in:", mapping(images))
"""


class Client(nbclient.NotebookClient):
    """Presses Interrupt when a cell asks for it."""

    def process_message(self, message, cell, index):
        if "press Interrupt" in message["content"].get("text", ""):
            self.pressed = asyncio.ensure_future(self.km.interrupt_kernel())
        return super().process_message(message, cell, index)


def notebook():
    cells = []
    for number, source in enumerate(CELLS.split("\n# Cell ")[1:]):
        cell = nbformat.v4.new_code_cell(
            f"# Cell {source.strip()}", id=f"cell-{number + 1}"
        )
        if "(raises)" in source.splitlines()[0]:
            cell.metadata["tags"] = ["raises-exception"]
        cells.append(cell)
    return nbformat.v4.new_notebook(cells=cells)


def main():
    found = notebook()
    client = Client(found, timeout=100, kernel_name="python3")
    client.execute(stderr=subprocess.DEVNULL)
    nbformat.write(found, "notebook.ipynb")
    for cell in found.cells:
        print(cell.source.splitlines()[0].removeprefix("# "))
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stdout":
                print("   ", output.text.rstrip())
            elif output.output_type == "display_data":
                print("   ", output.data["text/plain"])
            elif output.output_type == "error":
                print("   ", f"{output.ename}: {output.evalue}".rstrip(": "))


if __name__ == "__main__":
    main()
