"""The page about devices: its code runs, as far as it needs no GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from support.fake_accelerator import FakeAccelerator, taken_for_current

PAGE = Path(__file__).parents[2] / "docs" / "devices.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_loader_and_the_pipeline_of_the_page_have_their_batches_on_the_device() -> None:
    fake = FakeAccelerator("cuda:0", manual=False)
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    with taken_for_current(fake):
        exec(blocks[0].replace("torch.cuda.is_available()", "True"), names)
        exec(blocks[1], names)
        assert fake.holds(names["images"])
        assert all(fake.holds(batch) for batch in names["pipe"])
