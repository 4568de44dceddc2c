"""Docstrings as the source has them, for the reference: an extension of griffe, which reads the package.

griffe inspects the package while it is imported. So it takes the docstring of `str` for that of a class
attribute that is a string, has none for properties, and gives all parameters of a line ``a, b`` the
type of the first. Keywords that a function describes as those of a class get the texts of that class.
Parameters of torch's loader, which a docstring describes as torch's, get a text each, and paths of pages
become links.
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

from griffe import Attribute, Docstring, Extension, Function, Object, ObjectNode

GROUP = re.compile(r"^(\w+(?:, \*{0,2}\w+)+)((?: : .*)?)\n((?:    .*\n|\n)+)", re.MULTILINE)

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
PATH = re.compile(r"`{0,2}\bdocs/([\w/-]+\.md)\b`{0,2}")

TORCH = {
    "dataset": "Map-style dataset (`dataset[index]`, `len(dataset)`), or an `IterableDataset`.",
    "batch_size": "Number of samples in a batch. None returns single samples, which are not collated.",
    "shuffle": "True draws a new order of the samples for each epoch. Excludes `sampler`.",
    "sampler": "Iterable of the indices of the samples, in their order. Excludes `shuffle`.",
    "batch_sampler": "Iterable of lists of indices, a list for each batch. Excludes `batch_size`, "
    "`shuffle`, `sampler` and `drop_last`.",
    "num_workers": 'Number of workers; 0 lets the calling thread do the work. `"auto"` measures for at '
    "most 5 seconds before the first batch of the first epoch, and keeps its choice "
    "(docs/tuning.md). Batches and their order do not depend on the number; with "
    '`seeding="sample"`, random numbers do not, either.',
    "collate_fn": "Function that makes a batch of a list of samples. None is torch's `default_collate`, "
    "or `default_convert` with `batch_size=None`.",
    "pin_memory": "True copies batches to page-locked memory before `next()` returns them, so that they "
    "move to a device asynchronously.",
    "drop_last": "True drops the last batch of an epoch if it is not full.",
    "timeout": "Seconds that `next()` waits for a batch before it raises; 0 sets no limit.",
    "worker_init_fn": "Function that each worker calls with its number, after seeding and before its "
    "first sample.",
    "multiprocessing_context": 'Start method of worker processes (`"fork"`, `"spawn"`, '
    '`"forkserver"`), or a context of `multiprocessing`. Used where `backend` leaves the choice.',
    "generator": "Generator from which the orders of samples and the base seeds of workers are drawn. "
    "None is torch's default generator.",
    "prefetch_factor": "Number of batches that each worker has in flight. None is 2, or more while "
    "one is late.",
    "persistent_workers": "True keeps the workers and their copies of the dataset for the next epoch.",
    "pin_memory_device": "Device for which memory is page-locked. Deprecated by torch.",
    "in_order": "False returns batches in the order in which they are ready.",
}
"""Parameter of torch's loader -> its description, where a docstring has "As torch's" for all of them."""

REST = re.compile(r"^\*\*\w+\n((?:    .*\n|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^(\w+)\n((?:    .*\n|\n)+)", re.MULTILINE)


@cache
def of_attributes(module: str) -> dict[str, str]:
    """Return the docstrings that follow assignments in the source of a module, by qualified name."""
    found: dict[str, str] = {}
    imported = __import__(module, fromlist=["_"])

    def look(body: list[ast.stmt], prefix: str) -> None:
        for one, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(one, ast.ClassDef):
                look(one.body, f"{prefix}{one.name}.")
            targets = getattr(one, "targets", None) or [getattr(one, "target", None)]
            text = isinstance(after, ast.Expr) and getattr(after.value, "value", None)
            if isinstance(targets[0], ast.Name) and isinstance(text, str):
                found[prefix + targets[0].id] = inspect.cleandoc(text)

    look(ast.parse(inspect.getsource(imported)).body, "")
    return found


def separate(text: str) -> str:
    """Return a docstring in which each parameter of a group has a line, and its text or the group's."""

    def entries(found: re.Match[str]) -> str:
        texts = TORCH if found[3].lstrip().startswith("As torch's") else {}
        return "".join(
            f"{name}{found[2]}\n" + (f"    {texts[name]}\n" if name in texts else found[3])
            for name in found[1].split(", ")
        )

    return GROUP.sub(entries, text)


def linked(text: str) -> str:
    """Return a docstring in which the path of a page is a link with the title of the page."""

    def link(found: re.Match[str]) -> str:
        title = (DOCS / found[1]).read_text(encoding="utf-8").partition("\n")[0]
        return f"[{title.lstrip('# ')}](../{found[1]})"

    return PATH.sub(link, text)


def spelled_out(text: str, names: list[str]) -> str:
    """Return a docstring in which the keywords `names` have the texts of the class that is named."""

    def entries(rest: re.Match[str]) -> str:
        module, _, name = re.findall(r"`(hybridloader[\w.]*)`", rest[1])[0].rpartition(".")
        kind = getattr(__import__(module, fromlist=["_"]), name)
        texts = dict(ENTRY.findall(separate(f"{inspect.getdoc(kind)}\n")))
        described = {found[0] for found in ENTRY.findall(text)}
        return "".join(f"{n}\n{texts[n].rstrip()}\n" for n in names if n not in described) + "\n"

    return REST.sub(entries, f"{text}\n")


class Docstrings(Extension):
    """Corrects docstrings of attributes, properties and groups of parameters."""

    def on_attribute_instance(self, *, node: Any, attr: Attribute, **kwargs: Any) -> None:
        if not isinstance(node, ObjectNode):
            return
        if "_tuplegetter" in str(attr.value):  # a field of a named tuple
            attr.value = None
        text = self._text(node, attr)
        attr.docstring = Docstring(linked(text), parent=attr) if text else None

    def on_function_instance(self, *, node: Any, func: Function, **kwargs: Any) -> None:
        self._separate(func)
        if func.docstring is not None:
            names = [parameter.name for parameter in func.parameters if parameter.name != "self"]
            func.docstring.value = linked(spelled_out(func.docstring.value, names))

    def on_class_instance(self, *, node: Any, cls: Object, **kwargs: Any) -> None:
        self._separate(cls)

    def on_class_members(self, *, node: Any, cls: Object, **kwargs: Any) -> None:
        """Show the descriptors that are properties of another kind."""
        for name, value in vars(getattr(node, "obj", object)).items():
            member = cls.members.get(name)
            text = inspect.getdoc(value)
            if member is not None and member.is_alias and hasattr(type(value), "__get__") and text:
                attribute = Attribute(name)
                attribute.docstring = Docstring(linked(text), parent=attribute)
                attribute.labels.add("property")
                cls.set_member(name, attribute)

    def _text(self, node: ObjectNode, attr: Attribute) -> str:
        if isinstance(node.obj, property) or node.is_property or node.is_cached_property:
            return inspect.getdoc(node.obj) or ""
        owner = getattr(node.parent, "obj", None)
        for base in getattr(owner, "__mro__", ()):
            if base.__module__.startswith("hybridloader"):
                found = of_attributes(base.__module__).get(f"{base.__qualname__}.{attr.name}")
                if found:
                    return found
        return ""

    def _separate(self, found: Object) -> None:
        if found.docstring is not None:
            found.docstring.value = linked(separate(found.docstring.value))
