"""Pages of the site that lie outside docs/, and links as the site needs them: a hook of mkdocs.

Pages are written to be read in the repository, too. So the hook adds the README as the home page, the
changelog, the guide for contributors, the examples, and the reference (`reference`). A link to a file
that has no page on the site becomes its path, as text.
"""

from __future__ import annotations

import atexit
import posixpath
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent.parent
INSTALLED = ROOT / ".cache" / "site"
"""The package as a wheel has it, with `backends` inside; mkdocs.yml has mkdocstrings read it there."""

atexit.register(shutil.rmtree, INSTALLED, ignore_errors=True)
shutil.rmtree(INSTALLED, ignore_errors=True)
shutil.copytree(ROOT / "hybridloader", INSTALLED / "hybridloader")
shutil.copytree(ROOT / "backends", INSTALLED / "hybridloader" / "backends")
sys.path[:0] = [str(INSTALLED), str(Path(__file__).parent)]

import reference  # noqa: E402

MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
}
"""Path in the repository -> path of the page on the site."""
UNSEARCHED = ("decisions.md", "examples/")
"""Pages, or folders of them, that the search does not find."""
BOOST = {
    "troubleshooting.md": 2.0,
    "reference/": 0.1,
    "project/": 0.1,
    "benchmarks.md": 0.1,
    "frameworks/": 0.5,
    "index.md": 0.5,
}
"""Page or folder -> weight of its matches in the search, against 1 of a guide."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^(?:```|~~~).*?^(?:```|~~~)\s*$)", re.MULTILINE | re.DOTALL)


def page_of(path: str) -> str | None:
    """Return the page of the site that shows a file of the repository, if there is one."""
    if path in MOVED:
        return MOVED[path]
    if path.startswith("docs/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    if path.startswith("examples/") and path.endswith(".py"):
        return f"{path[:-3]}.md"
    return None


def source_of(page: str) -> str:
    """Return the file of the repository that a page of the site is made of."""
    moved = {new: old for old, new in MOVED.items()}
    return moved.get(page, f"docs/{page}")


def for_site(text: str, page: str) -> str:
    """Return Markdown of the repository with the links that it needs on the site."""
    source = posixpath.dirname(source_of(page))

    def link(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        path, mark, anchor = target.partition("#")
        if "://" in target or not path or target.startswith("mailto:"):
            return match[0]
        file = posixpath.normpath(posixpath.join(source, path))
        found = page_of(file)
        if found is None:  # no page: a part of the code, say
            name = label.strip("`")
            return f"`{file}`" if name in (file, path) else f"{label} (`{file}`)"
        there = posixpath.relpath(found, posixpath.dirname(page) or ".")
        return f"{image}[{label}]({there}{mark}{anchor})"

    parts = FENCE.split(text)
    return "".join(part if n % 2 else LINK.sub(link, part) for n, part in enumerate(parts))


def on_files(files: Any, config: Any) -> Any:
    for source, page in MOVED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=for_site(text, page)))
    for path in sorted((ROOT / "examples").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        text = f"# {path.name}\n\n`{name}`\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
        page = File.generated(config, f"{name[:-3]}.md", content=text)
        files.append(page)
    for name, text in reference.pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    uri = page.file.src_uri
    boost = next((weight for name, weight in BOOST.items() if uri.startswith(name)), 1.0)
    page.meta["search"] = {"exclude": uri.startswith(UNSEARCHED), "boost": boost}
    if uri in MOVED.values() or uri.startswith(("reference/", "examples/")):
        return markdown
    return for_site(markdown, uri)
