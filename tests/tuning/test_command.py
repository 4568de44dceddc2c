"""``hybridloader tune SCRIPT``: the first loader with enough batches is tuned, and the script ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.data

from hybridloader import DataLoader
from hybridloader.tuning.script_loader import FirstLoader, Found, TunedEnd
from tests.support.manual_clock import Clock

SCRIPT = """
import sys
import torch

print(sys.argv[1:])
few = torch.utils.data.DataLoader(range(8), 4)
list(few)
loader = torch.utils.data.DataLoader(range(1000), 4)  # this one
for batch in loader:
    pass
print("not reached")
"""


def test_the_line_of_the_loader_and_the_code_are_printed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "hybridloader", "tune", "--seconds", "0.2", str(script), "--x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("['--x']\nThe loader was made at ")
    assert "train.py:8: loader = torch.utils.data.DataLoader(range(1000), 4)" in done.stdout
    assert "chosen" in done.stdout
    assert "hybridloader.DataLoader(..., num_workers=" in done.stdout
    assert "not reached" not in done.stdout


@pytest.mark.parametrize("of", [DataLoader, torch.utils.data.DataLoader])
def test_the_loop_is_timed_without_waits(of: type[torch.utils.data.DataLoader[int]]) -> None:
    clock, found = Clock(), list[Found]()
    methods = [vars(torch.utils.data.DataLoader)[name] for name in ("__init__", "__iter__")]

    class Waits(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> int:
            clock.now += 5.0
            return index

    def script() -> None:
        for _ in of(Waits(), 2):
            clock.now += 0.25

    with pytest.raises(TunedEnd), FirstLoader(found.append, batches=3, clock=clock):
        script()
    assert [round(one.loop, 3) for one in found] == [0.25]
    assert found[0].place is not None
    assert found[0].place.file == __file__
    assert [vars(torch.utils.data.DataLoader)[n] for n in ("__init__", "__iter__")] == methods
