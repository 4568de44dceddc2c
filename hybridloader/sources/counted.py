"""`counted`: a request that counts itself where somebody observes: its time, and that to the first byte.

fsspec's file systems return whole answers. The time to the first byte is known where aiohttp is below
them (http, s3), which calls functions at the begin of a request and after the head of its answer.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, TypeVar

from hybridloader._support.attributes import attribute
from hybridloader._support.store_use import count, counting

R = TypeVar("R")

_adding = threading.Lock()

ahead = threading.local()
"""`ahead.reads` is True in a thread that prefetches: no worker waits for its requests."""


def counted(call: Callable[[], R], url: str, fs: Any) -> Callable[[], R]:
    """Return `call`, a request by `fs`, as a function that counts each time it is called."""
    _time_answers(fs, url)
    tries = itertools.count()

    def request() -> R:
        again = int(next(tries) > 0)
        began, size = perf_counter(), 0
        try:
            found = call()
            size = len(found) if isinstance(found, bytes) else 0
            return found
        finally:
            seconds = perf_counter() - began
            waited = 0.0 if attribute(ahead, "reads", False) else seconds
            count(url, requests=1, retries=again, bytes=size, seconds=seconds, waited=waited)
            _time_answers(fs, url)  # the session exists since the first request

    return request


def _time_answers(fs: Any, url: str) -> None:
    """Have the sessions of a file system call `_Answers`, if they are aiohttp's."""
    aiohttp = sys.modules.get("aiohttp")
    if aiohttp is None:
        return
    s3 = attribute(attribute(attribute(fs, "_s3"), "_endpoint"), "http_session")
    sessions = attribute(s3, "_sessions")
    found = [attribute(fs, "_session")]
    if isinstance(sessions, Mapping):
        found += [*sessions.values()]
    for session in found:
        configs = attribute(session, "_trace_configs")
        if isinstance(configs, list) and not any(map(_counts, configs)):
            answers, config = _Answers(url), aiohttp.TraceConfig()
            config.on_request_start.append(answers.begun)
            config.on_request_end.append(answers.answered)
            config.counts_answers = True
            config.freeze()
            with _adding:  # the first requests may come from several threads
                if not any(map(_counts, configs)):
                    configs.append(config)


def _counts(config: Any) -> bool:
    return hasattr(config, "counts_answers")


class _Answers:
    """Functions that a session calls. They count for its first store: buckets may share a session."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def begun(self, session: Any, context: Any, params: Any) -> None:
        context.began = perf_counter()

    async def answered(self, session: Any, context: Any, params: Any) -> None:
        """Note that the head of an answer has come."""
        if counting():
            count(self._url, answered=1, first_byte=perf_counter() - context.began)
