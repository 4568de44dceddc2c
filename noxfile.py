"""Sessions of the tests: ``nox -s tests`` for each Python, ``free_threaded`` without a GIL, ``windows``.

``nox -s other_torch`` runs them on other versions of torch.

CONTRIBUTING.md says how to get the interpreters. ``nox -s tests-3.13 -- tests/storms`` runs a part.
"""

from __future__ import annotations

import nox

nox.options.error_on_missing_interpreters = False

TORCH = {"3.10": "2.11.0", "3.11": "2.13.0", "3.12": "2.13.0", "3.13": "2.13.0", "3.14": "2.13.0"}
"""torch for each Python: the one of constraints.txt, and an older one."""

OTHER_TORCH = [("3.10", "2.6.0")] + [
    ("3.11", torch) for torch in ("2.6.0", "2.8.0", "2.10.0", "2.12.0", "2.14.1", "2.15.0")
]
"""Further pairs of a Python and a torch, from the oldest of both on. README's table has what ran."""

TORCH_WITHOUT_GIL = {"3.13t": "2.12.0", "3.14t": "2.13.0"}
"""torch for each free-threaded Python: 2.12 is the last with wheels for 3.13t."""

# Not the extra [test]: its newest hypothesis has no wheel for Python 3.13t, and builds with Rust.
WITHOUT_GIL = """
    numpy loky cloudpickle aiohttp fsspec hypothesis<6.150 matplotlib pillow psutil pyarrow
    pytest pytest-timeout pytest-xdist scikit-image scikit-learn scipy setuptools<82
"""
"""Further packages for a free-threaded Python."""


def run(session: nox.Session) -> None:
    """Run the tests. Counts of a run of all go into the README's table, those of one that fails too."""
    if session.posargs:
        session.run("pytest", "-n", "logical", *session.posargs)
        return
    report = f"{session.create_tmp()}/report.xml"
    session.run("pytest", "-n", "logical", f"--junitxml={report}", success_codes=[0, 1])
    session.run("python", "tests/tested.py", report)  # fails if a test has


@nox.session(python=[*TORCH])
def tests(session: nox.Session) -> None:
    """Run the tests."""
    session.install("-e", ".[test]", f"torch=={TORCH[str(session.python)]}")
    run(session)


@nox.session
@nox.parametrize("python,torch", OTHER_TORCH)
def other_torch(session: nox.Session, torch: str) -> None:
    """Run the tests on an older or a newer torch. From PyPI, each takes gigabytes on Linux."""
    session.install("-e", ".[test]", f"torch=={torch}")
    run(session)


@nox.session(python=[*TORCH_WITHOUT_GIL])
def free_threaded(session: nox.Session) -> None:
    """Run the tests and the stress of many threads without a GIL."""
    torch = f"torch=={TORCH_WITHOUT_GIL[str(session.python)]}"
    session.install("--only-binary", ":all:", torch, *WITHOUT_GIL.split())
    session.install("--no-deps", "-e", ".")
    session.run("python", "-m", "pip", "uninstall", "-y", "triton")  # it turns the GIL on
    check = "import sys, torch, hybridloader; assert not sys._is_gil_enabled()"
    session.run("python", "-c", check)
    run(session)
    if not session.posargs:
        session.run("pytest", "-m", "full", "tests/storms/test_many_threads.py")


@nox.session(python=False)
def windows(session: nox.Session) -> None:
    """Run the tests on the API of Windows, by Wine."""
    report = f"{session.create_tmp()}/report.xml"
    suite = [".ci/windows", "tests", "-n", "2", f"--junitxml=Z:{report}"]
    session.run(*suite, *session.posargs, external=True, success_codes=[0, 1])
    if not session.posargs:
        session.run(".ci/windows", "python", "tests/tested.py", f"Z:{report}", external=True)
