"""The page about devices: its code runs, as far as it needs no GPU."""

from __future__ import annotations

import doctest
import io
import re
from pathlib import Path
from typing import Any

from hybridloader.devices.accelerator import taken_for_current
from hybridloader.testing import FakeAccelerator

PAGE = Path(__file__).parents[2] / "docs" / "devices.md"
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_loader_and_the_pipeline_of_the_page_have_their_batches_on_the_device() -> None:
    fake = FakeAccelerator("cuda:0", manual=False)
    blocks = [text for kind, text in BLOCK.findall(PAGE.read_text()) if kind == "python"]
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    with taken_for_current(fake):
        exec(blocks[0].replace("torch.cuda.is_available()", "True"), names)
        exec(blocks[1], names)
        assert fake.holds(names["images"])
        assert all(fake.holds(batch) for batch in names["pipe"])


def test_the_example_without_a_gpu_says_what_it_says() -> None:
    out = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False)
    for kind, text in BLOCK.findall(PAGE.read_text()):
        if kind == "pycon":
            example = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, None, None)
            runner.run(example, out=out.write)
    assert runner.tries >= 8
    assert runner.failures == 0, out.getvalue()
