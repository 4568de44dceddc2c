"""Connection of this process to a Ray cluster, and what Ray says of a worker that has ended."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from importlib import import_module
from typing import Any

from hybridloader import engine

SHUT_DOWN = "is gone: Ray was shut down"
"""Cause of an end: this process left the cluster while it had workers there."""


def package() -> Any:
    """Import Ray. It is not typed throughout, and only there if it is used."""
    return import_module("ray")


def check(address: str | None, *, start: bool) -> None:
    """Raise `BackendUnavailable` if Ray is not installed, or there is no cluster to connect to."""
    try:
        ray = package()
        ray.init  # noqa: B018  # a folder named `ray` beside the script, as Ray's own in /tmp, has none
    except (ImportError, AttributeError) as error:
        raise engine.BackendUnavailable(
            f"backend 'ray' needs Ray: pip install 'hybridloader[ray]' ({error})"
        ) from error
    wanted = _wanted(address)
    if (wanted or "").startswith("ray://") or ray.util.client.ray.is_connected():
        raise engine.BackendUnavailable(
            "backend 'ray' does not run behind Ray Client (ray://): Ray would keep all batches at "
            "the other end of the connection. Run the script on a machine of the cluster, such as "
            "by `ray job submit`."
        )
    if not (ray.is_initialized() or wanted or start):
        raise engine.BackendUnavailable(
            "backend 'ray' starts no cluster unasked, and this process is connected to none. Call "
            "ray.init() first, or say Ray(address='auto') for one that runs on this machine, "
            "Ray(address='HOST:6379') for another, or Ray(start=True) to start one here."
        )


def connect(address: str | None) -> None:
    """Connect this process to a cluster, if it is not: to that which runs here, or else a new one.

    With an address it is that cluster or an error.
    """
    ray = package()
    if ray.is_initialized():
        return
    if wanted := _wanted(address):
        ray.init(address=wanted)
    else:
        ray.init(include_dashboard=False)


def connection() -> Any:
    """Return what tells this connection to a cluster from any other; None if there is none."""
    ray = package()
    if ray.is_initialized():
        with suppress(Exception):  # another thread shuts it down
            context = ray.get_runtime_context()
            return context.get_job_id(), context.get_node_id()  # a new cluster counts jobs from 1
    return None


def exited(number: int, error: Exception) -> engine.Exited:
    """Return the end of a worker, by the error of the call in which it was.

    Ray's text has a headline, indented lines on the actor, the cause, and then advice. That of an
    error in the actor's own code ends with that error.
    """
    text = str(error).strip()
    lines = text.splitlines() or [repr(error)]
    at = 1
    while at < len(lines) and lines[at].startswith("\t"):
        at += 1
    at = at if 1 < at < len(lines) else len(lines) - 1
    why, common, causes = lines[at].partition("Some common causes")
    if "its owner has died" in why:  # that is this process, which has only left the cluster
        return engine.Exited(number, SHUT_DOWN)
    # No sample is to blame for a machine that has gone.
    blameless = -1 if "its node has died" in text else None
    node = re.search(r"Node Id: (\w+)", text) if blameless else None
    return engine.Exited(
        number,
        f"is gone: {why.strip().rstrip('. ')}",
        at=blameless,
        evidence="\n".join([common + causes, *lines[at + 1 :]]).strip(),
        with_it=None if node is None else f"node {node[1]}",
    )


def _wanted(address: str | None) -> str | None:
    return address or os.environ.get("RAY_ADDRESS")
