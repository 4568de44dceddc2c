"""Starter of workers that are forked from a zygote: the parent's side of that process.

The zygote's connection is one more of the crew's transport, under the number `ZYGOTE`. So a request
never blocks, and answers and the end of the zygote are noticed as those of a worker are.
"""

from __future__ import annotations

import functools
import os
import pickle
import socket
from collections.abc import Callable
from dataclasses import fields
from multiprocessing.connection import Connection
from typing import Any

from hybridloader._support.caller import warn_once
from hybridloader.backends.process.forked_handle import ForkedHandle
from hybridloader.backends.process.frames import Frame
from hybridloader.backends.process.handles import ProcessHandle
from hybridloader.backends.process.postmortem import PostmortemRecord
from hybridloader.backends.process.socket_transport import SocketTransport
from hybridloader.backends.process.starters import (
    ZYGOTE,
    Note,
    Starter,
    WorkerStart,
    duplicates,
)
from hybridloader.backends.process.starting import starting
from hybridloader.backends.process.zygote import Changed, Loaded, Refused, Request, serve
from hybridloader.engine.contract import GRACE
from hybridloader.engine.messages import WorkerSpec
from hybridloader.engine.refresh import Change, plain


class _Zygote:
    def __init__(self, spec: WorkerSpec, record: PostmortemRecord | None) -> None:
        self.record = record
        # All the mutable state:
        self.handle: ProcessHandle | None = None  # once it is started
        self.spec: WorkerSpec | None = spec  # that it loads; None once the dataset is another
        self.loaded = False
        self.asked: dict[int, tuple[WorkerStart, Note, ForkedHandle]] = {}  # until it has loaded

    @property
    def alive(self) -> bool:
        return self.handle is not None and self.handle.is_alive()

    def serves(self, spec: WorkerSpec) -> bool:
        """True if it has, or will have, the work of `spec`."""
        had = self.spec
        return had is not None and spec.fetch is had.fetch and spec.init_fn is had.init_fn

    def close(self) -> None:
        if self.handle is not None:
            self.handle.join(GRACE)
            self.handle.kill()
            self.handle.join(GRACE)
            self.handle.release()
        if self.record is not None:
            self.record.close()


class ZygoteStarter(Starter):
    """Starter that has one process, which has loaded the work, fork the workers.

    If that process ends, so do its workers, and the next start begins another.
    """

    def __init__(
        self,
        context: Any,  # loky's, which starts the zygote
        transport: SocketTransport,  # that of the crew
        fallback: Starter,  # starts workers where none can be forked
    ) -> None:
        self._context, self._transport, self._fallback = context, transport, fallback
        # All the mutable state:
        self._zygote: _Zygote | None = None
        self._refused = False

    def ships(self, spec: WorkerSpec) -> bool:
        zygote = self._zygote
        return zygote is None or not (zygote.loaded and zygote.alive and zygote.serves(spec))

    def start(self, start: WorkerStart, note: Note) -> None:
        zygote = self._zygote
        ended = zygote is None or not zygote.alive
        if ended and not self._refused and start.shipment is not None:
            zygote = self._begin(start)
        if (
            self._refused
            or zygote is None
            or zygote.handle is None
            or not zygote.serves(start.spec)
        ):
            self._fallback.start(start, note)
            return
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        handle = ForkedHandle(zygote.handle, status)
        try:
            assert zygote.spec is not None
            request = Request(
                start.worker,
                start.name,
                start.slots,
                start.record is not None,
                _changes(zygote.spec, start.spec),
            )
            message = pickle.dumps(request)
            connection = os.dup(start.connection.fileno())
            self._transport.send(ZYGOTE, [message], [connection, theirs.detach()])
        finally:
            theirs.close()
        if not zygote.loaded:
            zygote.asked[start.worker] = start, note, handle
        note(handle)

    def _begin(self, start: WorkerStart) -> _Zygote:
        """Start a zygote for the work that `start` ships."""
        shipment = start.shipment
        assert shipment is not None
        self.close()
        self._zygote = zygote = _Zygote(start.spec, PostmortemRecord.make())
        connection, theirs = self._context.Pipe(duplex=True)
        self._transport.drop(ZYGOTE)
        self._transport.connect(ZYGOTE, connection)
        recorded = zygote.record is not None
        process = self._context.Process(
            target=serve,
            args=(theirs, os.getpid(), recorded, shipment.inherited),
            name=f"hybridloader-{start.spec.stage}-zygote",
            daemon=True,
        )
        try:
            with starting(self._context.get_start_method()):
                process.start()
                zygote.handle = ProcessHandle(process)
        finally:
            theirs.close()
        self._transport.watch(ZYGOTE, zygote.handle)
        fds = shipment.fds if zygote.record is None else [*shipment.fds, zygote.record.fd]
        self._transport.send(ZYGOTE, shipment.parts, duplicates(fds))
        return zygote

    def hear(self, frame: Frame | None) -> Callable[[], None] | None:
        zygote = self._zygote
        if zygote is None or frame is None:
            return None
        message = pickle.loads(frame.parts[0])
        if isinstance(message, Refused):
            self._start_afresh(*zygote.asked.pop(message.worker), frame)
            if not zygote.asked:
                self._transport.drop(ZYGOTE)  # which ends it
                self.close()
            return None
        assert isinstance(message, Loaded)
        if not message.refusal:
            zygote.loaded = True
            zygote.asked.clear()
            return None
        self._refused = True
        stage = None if zygote.spec is None else zygote.spec.stage
        return functools.partial(
            warn_once,
            f"the workers of stage {stage!r} are started one by one, which takes longer and more memory "
            f"than to fork them from one process that has loaded the dataset: it {message.refusal}. Do "
            "that in worker_init_fn, or when the first sample is read; or say Spawn(zygote=False)",
        )

    def _start_afresh(
        self, start: WorkerStart, note: Note, handle: ForkedHandle, frame: Frame
    ) -> None:
        """Start a worker that the zygote has refused; `frame` brings its descriptors back."""
        handle.failed("was refused")  # now: the zygote may close its end of the socket later
        if len(frame.fds) < 2:
            handle.failed("could not be started: no descriptor is left (ulimit -n)")
            return
        connection = Connection(frame.fds[0])
        frame.fds.pop(0)
        os.close(frame.fds.pop())
        try:
            self._fallback.start(start._replace(connection=connection), note)
        except Exception as error:  # no process can be had any more, for instance
            handle.failed(f"could not be started: {error}")
        finally:
            connection.close()

    def change(self, changes: tuple[Change, ...]) -> None:
        zygote = self._zygote
        if zygote is None:
            return
        if all(plain(value) for _, value in changes):
            self._transport.send(ZYGOTE, [pickle.dumps(Changed(changes))])
        else:  # to load other values could import modules, which may start threads
            zygote.spec = None

    def evidence(self) -> str:
        record = None if self._zygote is None else self._zygote.record
        return "" if record is None else record.crash()

    def stack(self) -> str:
        zygote = self._zygote
        if zygote is None or zygote.record is None or zygote.handle is None:
            return ""
        pid = zygote.handle.pid
        if pid is None:
            return ""
        stack = zygote.record.stack(pid, send=zygote.handle.send_signal)
        return f"The process that is to fork it has yet to load the work:\n{stack}" if stack else ""

    def close(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.close()

    def disown(self) -> None:
        if self._zygote is not None and self._zygote.handle is not None:
            self._zygote.handle.disown()


def _changes(loaded: WorkerSpec, spec: WorkerSpec) -> dict[str, Any]:
    """Return the fields of `spec` that differ from those of the one that was loaded."""
    pairs = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return {name: value for name, value in pairs.items() if value is not getattr(loaded, name)}
