"""The tutorials and the cookbook: their code is that of a script, and their output that of a run.

    python tests/recipes.py [PAGE...]    # run the scripts, and write their output into the pages

A page under `docs/tutorials` or `docs/cookbook` names its scripts in `console` blocks: a line
`$ python examples/...`, and the output of that command. `test_recipe_pages.py` compares them.
"""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    page
    for kind in ("tutorials", "cookbook")
    for page in sorted((ROOT / "docs" / kind).glob("*.md"))
    if page.name != "README.md"
]
CONSOLE = re.compile(
    r"^```console\n\$ python (examples/\S+\.py)(.*)\n((?:.*\n)*?)```$", re.MULTILINE
)
PYTHON = re.compile(r"^( *)```python.*\n((?:.*\n)*?) *```$", re.MULTILINE)
NEEDS = re.compile(r"^# needs: (.+)$", re.MULTILINE)
SECONDS = 110
"""Limit for one command."""


class Command(NamedTuple):
    page: Path
    script: Path
    arguments: list[str]
    output: str

    @property
    def missing(self) -> list[str]:
        """The modules that the script needs (`# needs: NAME...`), and that are not installed."""
        needed = NEEDS.search(self.script.read_text())
        names = needed[1].split() if needed else []
        return [name for name in names if importlib.util.find_spec(name) is None]

    def run(self) -> str:
        """Run the script in an empty folder, and return its standard output.

        Raises
        ------
        RuntimeError
            If the script failed, or wrote a warning or a traceback.
        """
        environment = {**os.environ, "TERM": "dumb", "COLUMNS": "100", "PYTHONWARNINGS": "default"}
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, str(self.script), *self.arguments],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        problems = re.findall(r"^.*(?:Warning:|Traceback).*$", done.stderr, re.MULTILINE)
        ours = [line for line in problems if "hybridloader" in line or "Traceback" in line]
        if done.returncode != 0 or ours:
            name = self.script.relative_to(ROOT)
            raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        return done.stdout


def commands(page: Path) -> list[Command]:
    """Return the commands of a page, with the output that the page shows."""
    return [
        Command(page, ROOT / script, arguments.split(), output)
        for script, arguments, output in CONSOLE.findall(page.read_text())
    ]


def code(page: Path) -> list[str]:
    """Return the blocks of Python of a page, without the indentation of a list."""
    found = PYTHON.findall(page.read_text())
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


def masked(output: str) -> str:
    """Return an output with a `#` for each number and its unit, so that times may differ.

    The mark of the bottleneck, `<` after its load, is left out: it may be at another stage. So is the
    sentence of a `Headroom` about other programs: it depends on the machine.
    """
    output = re.sub(r"(?<=%) <", "", output)
    output = re.sub(r" Other programs kept .*? first\.", "", output)
    output = re.sub(
        r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?: (?:us|ms|s|KB|MB|GB|KiB|MiB|GiB|B)\b)?", "#", output
    )
    lines = [
        re.sub(r"-{2,}", "--", re.sub(r"\s+", " ", line)).strip() for line in output.splitlines()
    ]
    return "\n".join(line for line in lines if line) + "\n"


def agree(shown: str, seen: str) -> bool:
    """Return whether a page shows this output, but for its numbers.

    `...` stands for any text, and as a line for any number of lines.
    """
    wanted = masked(shown).replace("\n...\n", "...\n")
    return doctest.OutputChecker().check_output(wanted, masked(seen), doctest.ELLIPSIS)


def write(page: Path) -> None:
    """Write the output of each command of a page into it, but where the page abridges it by `...`."""
    text = page.read_text()
    for command in commands(page):
        if agree(command.output, seen := command.run()) and "..." in command.output:
            continue
        line = " ".join(
            ["\n$ python", command.script.relative_to(ROOT).as_posix(), *command.arguments]
        )
        text = text.replace(f"{line}\n{command.output}```", f"{line}\n{seen.rstrip()}\n```", 1)
    page.write_text(text)


if __name__ == "__main__":
    for one in [Path(name).resolve() for name in sys.argv[1:]] or PAGES:
        print(one.relative_to(ROOT), flush=True)
        write(one)
