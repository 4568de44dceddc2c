"""Names for authors of a backend, in one module that imports neither torch nor numpy.

Write three classes, with six methods in all:

- `Backend`: `open` makes a crew;
- `Crew`: `start` starts a worker and `send` sends it a message;
- `WorkerHandle`: `is_alive`, `terminate` and `join`, as of `multiprocessing.Process`.

`hybridloader.engine.contract` documents the duties of each method, and the methods that have a default.
The engine provides the worker: make it by `thread_worker` or `process_worker`, and run it by `serve`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridloader._support.lazily import lazily

if TYPE_CHECKING:
    from hybridloader._support.user_objects import Failure as Failure
    from hybridloader.engine.calls import CalledWorker as CalledWorker
    from hybridloader.engine.calls import CallingHandle as CallingHandle
    from hybridloader.engine.calls import Place as Place
    from hybridloader.engine.calls import parts_of as parts_of
    from hybridloader.engine.calls import work_of as work_of
    from hybridloader.engine.contract import Backend as Backend
    from hybridloader.engine.contract import Crew as Crew
    from hybridloader.engine.contract import WorkerHandle as WorkerHandle
    from hybridloader.engine.contract import backend_names as backend_names
    from hybridloader.engine.contract import get_backend as get_backend
    from hybridloader.engine.messages import Begin as Begin
    from hybridloader.engine.messages import ByReference as ByReference
    from hybridloader.engine.messages import Done as Done
    from hybridloader.engine.messages import Event as Event
    from hybridloader.engine.messages import Exhausted as Exhausted
    from hybridloader.engine.messages import Exited as Exited
    from hybridloader.engine.messages import Failed as Failed
    from hybridloader.engine.messages import Fetch as Fetch
    from hybridloader.engine.messages import Fetcher as Fetcher
    from hybridloader.engine.messages import Message as Message
    from hybridloader.engine.messages import Payload as Payload
    from hybridloader.engine.messages import Ready as Ready
    from hybridloader.engine.messages import Stop as Stop
    from hybridloader.engine.messages import Task as Task
    from hybridloader.engine.messages import TaskContext as TaskContext
    from hybridloader.engine.messages import WorkerSpec as WorkerSpec
    from hybridloader.engine.serving import PackedSpec as PackedSpec
    from hybridloader.engine.serving import Pickled as Pickled
    from hybridloader.engine.serving import dumps as dumps
    from hybridloader.engine.serving import loads as loads
    from hybridloader.engine.serving import process_worker as process_worker
    from hybridloader.engine.serving import serve as serve
    from hybridloader.engine.serving import thread_worker as thread_worker
    from hybridloader.engine.worker import Worker as Worker
    from hybridloader.errors import BackendUnavailable as BackendUnavailable
    from hybridloader.errors import ResultPicklingError as ResultPicklingError
    from hybridloader.errors import WorkerPicklingError as WorkerPicklingError
    from hybridloader.memory.slots import PrivateSlots as PrivateSlots

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        ".errors": "BackendUnavailable ResultPicklingError WorkerPicklingError",
        "._support.user_objects": "Failure",
        "calls": "CalledWorker CallingHandle Place parts_of work_of",
        "contract": "Backend Crew WorkerHandle backend_names get_backend",
        ".memory.slots": "PrivateSlots",
        "messages": "Begin ByReference Done Event Exhausted Exited Failed Fetch Fetcher Message Payload "
        "Ready Stop Task TaskContext WorkerSpec",
        "serving": "PackedSpec Pickled dumps loads process_worker serve thread_worker",
        "worker": "Worker",
    },
)
