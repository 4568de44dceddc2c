"""Each tutorial and recipe shows the code of its script, and the output of its commands."""

from __future__ import annotations

from pathlib import Path

import pytest
import recipes
from support.excerpts import is_part

from hybridloader.observe import Headroom

COMMANDS = [command for page in recipes.PAGES for command in recipes.commands(page)]


def name(command: recipes.Command) -> str:
    return " ".join([command.script.relative_to(recipes.ROOT).as_posix(), *command.arguments])


@pytest.mark.recipes
@pytest.mark.parametrize("command", COMMANDS, ids=name)
def test_a_command_prints_what_its_page_shows(command: recipes.Command) -> None:
    if command.missing:
        pytest.skip(f"needs {', '.join(command.missing)}")
    seen = command.run()
    assert recipes.agree(command.output, seen), f"{command.page.name} shows other output:\n{seen}"


@pytest.mark.parametrize("page", recipes.PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_the_code_of_a_page_is_that_of_its_scripts(page: Path) -> None:
    scripts = {command.script.read_text() for command in recipes.commands(page)}
    assert scripts, "a page shows at least one command"
    for block in recipes.code(page):
        shown = any(is_part(block, script) for script in scripts)
        assert shown, f"this block of {page.name} is in none of its scripts:\n{block}"


def test_every_script_has_a_page() -> None:
    shown = {command.script for command in COMMANDS}
    folders = [recipes.ROOT / "examples" / kind for kind in ("tutorials", "cookbook")]
    assert {script for folder in folders for script in folder.glob("*.py")} == shown


@pytest.mark.parametrize(
    ("shown", "seen", "same"),
    [
        ("worker  12.5 ms\n", "worker  3 ms\n", True),
        ("a 1\nb 2\n", "a 1\nc 2\n", False),
        ("a 1\n...\nc 2\n", "a 1\nb 2\nc 3\n", True),
        ("a 1\n...\nc 2\n", "a 1\nc 2\n", True),
        ("a 1\n...\n", "a 1\n", True),
        ("", "something\n", False),
        ("-----  ---\n", "---  -------\n", True),
        ("read    65% <\ndecode  35%\n", "read      9%\ndecode  99% <\n", True),
        ("read    1 < 2\n", "read    1 2\n", False),
        (f"{Headroom(2, 1, 1, 1)}\n", f"{Headroom(2, 1, 1, 1, others=1.5)}\n", True),
    ],
)
def test_outputs_are_compared_but_for_their_numbers(shown: str, seen: str, same: bool) -> None:
    assert recipes.agree(shown, seen) is same
