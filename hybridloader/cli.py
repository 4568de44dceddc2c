"""Command line: ``hybridloader demo``, ``run``, ``write-shards``, ``info`` and ``explain``.

It parses and reports. Nothing heavy is imported before a subcommand runs, and a user's mistake is
one line on standard error and exit code 2, never a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hybridloader._version import __version__

BAD_INPUT = 2
INTERRUPTED = 130  # 128 and the number of SIGINT, as shells count


class _Parser(argparse.ArgumentParser):
    """Parser that prints an error as one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default that of this process).

    Returns
    -------
    int
        The exit code: 0, 2 for bad input, 130 after Ctrl-C. The last exception of a script that was run
        is raised, for Python to end the process by it.
    """
    arguments, unknown = _parser().parse_known_args(argv)
    if unknown:  # parse_args would complain of them in the name of the whole, not of the subcommand
        arguments.parser.error(f"unknown arguments: {' '.join(unknown)}")
    name = f"hybridloader {arguments.command}"
    try:
        problem: str | None = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        if arguments.run is _run:
            raise
        # The reader, such as `head`, has enough. Python would flush again at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        if arguments.run is _run:
            raise
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    if problem is not None:
        print(f"{name}: {problem}", file=sys.stderr)
        return BAD_INPUT
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hybridloader",
        description="A data-loading executor for PyTorch. The options of a command: "
        "hybridloader COMMAND --help.",
    )
    parser.add_argument("--version", action="version", version=f"hybridloader {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_run(commands)
    _add_pack(commands)
    _command(
        *(commands, "info", _info),
        help="print what a bug report needs: versions, limits, backends",
        description="Print the versions and limits that a bug report needs, and which backends work.",
    )
    explain = _command(
        *(commands, "explain", _explain),
        help="print the section of the troubleshooting page that an error or a warning names",
        description="Print the section of the troubleshooting page on an error or a warning.",
    )
    explain.add_argument("name", metavar="NAME", help="the last word of an error or a warning")
    return parser


def _command(commands: Any, name: str, run: Callable[..., str | None], **texts: Any) -> Any:
    """Add a command that calls `run` with the arguments, and return its parser."""
    command = commands.add_parser(name, **texts)
    command.set_defaults(run=run, parser=command)
    return command


def _add_demo(commands: Any) -> None:
    demo = _command(
        *(commands, "demo", _demo),
        help="train a small network on photographs, and compare with torch's loader",
        description="Train a small network that recognizes from which of ten photographs a crop comes, "
        "then compare with torch's loader. The first run cuts the photographs, which "
        "scikit-image and scikit-learn contain, into 4,500 JPEG files.",
    )
    _add_options(
        demo,
        ("--data", Path, "DIR", "train on these images: a folder with one folder per class"),
        ("--cache", Path, "DIR", "folder that keeps the JPEG files for later runs"),
        ("--backend", str, "NAME", "backend of the training; default: processes, as by torch"),
        ("--workers", _at_least(0), "N", "number of workers; default: one per core, at most 4"),
        ("--batch-size", _at_least(1), "N", "default: 64", 64),
        ("--epochs", _at_least(1), "N", "default: 2", 2),
        ("--limit", _at_least(1), "N", "train on the first N images only"),
    )
    demo.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with torch's loader after the training (default: yes)",
    )


def _add_run(commands: Any) -> None:
    run = _command(
        *(commands, "run", _run),
        usage="%(prog)s [OPTION ...] SCRIPT [ARGUMENT ...]\n       %(prog)s [OPTION ...] -m MODULE "
        "[ARGUMENT ...]",
        help="run a script with its torch DataLoaders on hybridloader's engine",
        description="Run a Python script as `python SCRIPT` does, with every torch DataLoader in it on "
        "hybridloader's engine, as after hybridloader.install(). The script is not edited.",
        epilog="Options without a description have the meaning documented in hybridloader.DataLoader. A "
        "loader that can't have an option ignores it. Arguments after SCRIPT are passed to it.",
        allow_abbrev=False,
    )
    absent = argparse.SUPPRESS
    _add_options(
        run,
        ("--backend", str, "NAME", "default: processes, started as by torch"),
        ("--threads-per-worker", _at_least(1), "N", None, absent),
        ("--on-error", str, "raise|skip", None, absent),
        ("--on-worker-death", str, "raise|restart", None, absent),
        ("--task-timeout", float, "SECONDS", None, absent),
        ("--seeding", str, "worker|sample|shared", None, absent),
        ("--device", str, "DEVICE", None, absent),
        (
            "--trace",
            str,
            "FILE",
            "record a trace, .json or .json.gz; several ranks: 'run-$RANK.json'",
        ),
        ("--stats", None, None, "write the statistics and the verdict of each loader at the end"),
    )
    run.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is the name of a module"
    )
    run.add_argument("script", metavar="SCRIPT")
    rest = run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    rest.required = False


def _add_pack(commands: Any) -> None:
    pack = _command(
        *(commands, "write-shards", _pack),
        help="write a folder into shards: tar archives",
        description="Write samples into shards that Tar and webdataset read, each archive with its "
        "index. Nothing is overwritten. The same command resumes after an interruption.",
    )
    pack.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder or a glob of files, of which those with the same name up to the first dot are "
        "one sample",
    )
    pack.add_argument("-o", "--output", required=True, metavar="URL", help="a folder, empty or new")
    _add_options(
        pack.add_mutually_exclusive_group(),
        ("--samples-per-shard", _at_least(1), "N", "number of samples in a shard"),
        ("--bytes-per-shard", _bytes, "SIZE", "size of a shard, such as 64M; default: 256M"),
    )
    _add_options(
        pack,
        ("--classes", None, None, "add the number of each sample's folder as the field cls"),
        ("--workers", _at_least(1), "N", "number of threads that read samples; default: 4", 4),
        (
            *("--storage-options", _json_object, "JSON"),
            """options of fsspec for the store, such as '{"anon": true}'""",
            {},
        ),
    )


def _add_options(command: Any, *options: tuple[Any, ...]) -> None:
    """Add options: flag, type (None: without a value), name of the value, help, and default."""
    for flag, kind, metavar, text, *default in options:
        if kind is None:
            command.add_argument(flag, action="store_true", help=text)
        else:
            value = default[0] if default else None
            command.add_argument(flag, type=kind, metavar=metavar, help=text, default=value)


def _bytes(text: str) -> int:
    units = {"K": 10, "M": 20, "G": 30}
    shift = units.get(text[-1:].upper(), 0)
    try:
        value = int(float(text[:-1]) * (1 << shift)) if shift else int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a size such as 500000, 64M or 1G, not {text!r}")
    return value


def _json_object(text: str) -> dict[str, Any]:
    import json

    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, not {text!r}")
    return value


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
        return value

    return whole_number


def _run(arguments: argparse.Namespace) -> str | None:
    """Run a script; return the error in the input as one line, or None."""
    from hybridloader.compat import script
    from hybridloader.compat.torch_loaders import install
    from hybridloader.loader.options import OptionWords

    options: Any = {
        name: getattr(arguments, name)
        for name in OptionWords.__annotations__
        if hasattr(arguments, name)
    }
    find = script.module if arguments.module else script.script
    try:
        program = find(arguments.script)  # a package on the way is the user's code
    except script.NotThere as error:
        return str(error)
    try:
        install(arguments.backend, **options)
    except (ValueError, RuntimeError) as error:
        return str(error)
    with contextlib.ExitStack() as around:
        if arguments.trace is not None:
            from hybridloader.observe.tracing import trace

            try:
                around.enter_context(trace(os.path.expandvars(arguments.trace)))
            except (ValueError, OSError) as error:
                return str(error)
        if arguments.stats:
            from hybridloader.observe.observation import Tables

            around.enter_context(Tables())
        script.run(program, arguments.arguments)
    return None


def _pack(arguments: argparse.Namespace) -> str | None:
    """Pack the files of a folder; return the error as text, or None."""
    from hybridloader.sources.writing import FolderSamples, write_shards

    options = arguments.storage_options if "://" in arguments.source else {}
    try:
        source = FolderSamples(arguments.source, classes=arguments.classes, storage_options=options)
        if source.ignored:
            skipped = f"{source.ignored:,} files are skipped: hidden, or without an extension"
            print(skipped, file=sys.stderr)
        counts = write_shards(
            source,
            arguments.output,
            samples_per_shard=arguments.samples_per_shard,
            bytes_per_shard=arguments.bytes_per_shard,
            workers=arguments.workers,
            storage_options=arguments.storage_options,
            report=_show,
        )
    except (OSError, ImportError, ValueError, TypeError) as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    each = f"{min(counts):,} to {max(counts):,}"
    print(f"{sum(counts):,} samples in {len(counts):,} shards, {each} in each", file=sys.stderr)
    return None


def _info(arguments: argparse.Namespace) -> None:
    """Print the versions and limits of this process, a line each."""
    import multiprocessing
    import platform
    import shutil
    from importlib.metadata import PackageNotFoundError, version

    from hybridloader._support import system
    from hybridloader.engine import get_backend
    from hybridloader.engine.contract import backend_names
    from hybridloader.errors import BackendUnavailable
    from hybridloader.memory.limits import process_limit
    from hybridloader.observe.measures import affinity, limit

    found = {"Python": sys.version, "system": f"{platform.platform()}, {platform.machine()}"}
    packages = ("hybridloader", "torch", "numpy", "loky", "cloudpickle")
    for package in (*packages, "fsspec", "s3fs", "pyarrow", "pillow", "ray"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            if package in packages:
                found[package] = "not installed"
    with contextlib.suppress(
        ImportError, OSError
    ):  # a torch that can't be imported is reported as well
        from hybridloader._support.installed_torch import current_accelerator

        found["accelerator"] = str(current_accelerator() or "none")
    found["CPUs"] = f"{limit().cores:g} of {len(affinity())}"
    found["memory"] = f"{process_limit() / 2**30:.1f} GiB"
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(Path(system.ROOT, "dev/shm")).free
        found["/dev/shm"] = f"{free / 2**30:.1f} GiB free"
    found["open files"] = f"{system.soft_limit('RLIMIT_NOFILE') or 'no limit'}"
    found["start method"] = multiprocessing.get_start_method()
    for name in backend_names():
        try:
            get_backend(name).check()
            found[name] = "works"
        except BackendUnavailable as error:
            found[name] = str(error).splitlines()[0]
    for name, text in found.items():
        print(f"{name:15} {text}")


def _explain(arguments: argparse.Namespace) -> str | None:
    """Print a section or a row of the troubleshooting page; return the error in the input, or None."""
    from hybridloader._support.text import meant

    package = Path(__file__).parent
    folder = package if (package / "docs").exists() else package.parent  # installed, or a checkout
    page = (folder / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    page = re.sub(r"\]\((?=[a-z-]+\.md)", "](docs/", page)
    _, *pieces = re.split(r"^#+ (.+)\n", page, flags=re.MULTILINE)
    sections = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-"): f"{title}\n{text}".strip()
        for title, text in zip(pieces[::2], pieces[1::2], strict=True)
    }
    for name, row in re.findall(r'^\| <a id="([\w-]+)"></a>(.*) \|$', page, re.MULTILINE):
        warning, meaning, cure = row.split(" | ")
        sections[name] = f"{warning}\n\nMeaning: {meaning}.\nCure: {cure}."
    name = arguments.name.lower()
    if name not in sections:
        return (
            f"there is no section {name!r}; {meant(name, sections)}errors and warnings name theirs"
        )
    print(sections[name])
    return None


def _show(done: int) -> None:
    """Count shards on a terminal."""
    if sys.stderr.isatty():
        print(f"{done:,} shards are done", end="\r", file=sys.stderr, flush=True)


def _demo(arguments: argparse.Namespace) -> str | None:
    """Run the demo; return the error in the input as one line, or None."""
    needed = {"PIL": "pillow"}
    if arguments.data is None:
        needed |= {"skimage": "scikit-image", "sklearn": "scikit-learn"}
    missing = [package for name, package in needed.items() if not importlib.util.find_spec(name)]
    if missing:
        return f"needs {' and '.join(missing)}; install it with: pip install {' '.join(missing)}"
    from hybridloader.demo import DemoError, run
    from hybridloader.errors import BackendUnavailable

    options = {**vars(arguments)}
    del options["command"], options["run"], options["parser"]
    try:
        run(**options)
    except (BackendUnavailable, DemoError) as error:
        return str(error)
    return None
