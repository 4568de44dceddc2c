"""All that an author of a backend needs, in one module that imports neither torch nor numpy.

`Backend`, `Crew` and `WorkerHandle` are the classes to write; `hybridloader.contract` tells what each
method owes. `thread_worker`, `process_worker` and `serve` are the worker, which is not an author's
to write: the crew carries its messages and its events.
"""

from hybridloader.contract import Backend, ByReference, Crew, Payload, WorkerHandle
from hybridloader.errors import BackendUnavailable, Failure, ResultNotSendable, ShippingError
from hybridloader.fetcher import Fetch, Fetcher, TaskContext
from hybridloader.messages import (
    Begin,
    Done,
    Event,
    Exhausted,
    Exited,
    Failed,
    First,
    Message,
    Ready,
    Stop,
    Task,
    WorkerSpec,
)
from hybridloader.serving import (
    PackedSpec,
    Pickled,
    dumps,
    loads,
    process_worker,
    serve,
    thread_worker,
)
from hybridloader.worker import Worker

__all__ = [
    "Backend",
    "BackendUnavailable",
    "Begin",
    "ByReference",
    "Crew",
    "Done",
    "Event",
    "Exhausted",
    "Exited",
    "Failed",
    "Failure",
    "Fetch",
    "Fetcher",
    "First",
    "Message",
    "PackedSpec",
    "Payload",
    "Pickled",
    "Ready",
    "ResultNotSendable",
    "ShippingError",
    "Stop",
    "Task",
    "TaskContext",
    "Worker",
    "WorkerHandle",
    "WorkerSpec",
    "dumps",
    "loads",
    "process_worker",
    "serve",
    "thread_worker",
]
