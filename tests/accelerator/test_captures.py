"""CUDA graphs that are captured while the loader's threads pin memory and query events."""

from __future__ import annotations

from support.device_loaders import only_cuda, run

pytestmark = only_cuda

CAPTURING = """
import threading

from support.digested_batches import SIZE

static = torch.ones(8, SIZE, dtype=torch.uint8, device=KIND)
out = torch.zeros(8, SIZE, dtype=torch.int16, device=KIND)
out.copy_(static).mul_(3)  # loads the kernels

def captured(busy, mode="thread_local"):
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        out.copy_(static).mul_(3)
        while busy():
            out.copy_(static).mul_(3)
    return graph
"""


def test_a_loop_captures_while_another_one_takes_batches() -> None:
    """The captures last until the other loop has taken ten batches: with pins, marks and copies."""
    run(
        CAPTURING
        + """
failed, taken, stop = [], [], threading.Event()

def train():
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                loader = loader_of(160, BACKENDS["threads"], device=KIND)
                found = []
                for batch in loader:
                    found.append(digest(batch))
                    taken.append(None)
                    del batch
                failed.extend([] if torch.equal(torch.cat(found).cpu(), right) else ["wrong"])
    except BaseException as error:
        failed.append(error)

right = wanted(160)
captured(lambda: False)  # kernels are loaded before
thread = threading.Thread(target=train)
thread.start()
try:
    while len(taken) < 40 and not failed:
        torch.cuda.synchronize()
    for _ in range(3):
        most = len(taken) + 10
        graph = captured(lambda: len(taken) < most and not failed)
        graph.replay()
        torch.cuda.synchronize()
        assert (out == 3).all()
finally:
    stop.set()
    thread.join()
assert not failed, failed
"""
    )


def test_a_loop_captures_between_two_of_its_batches() -> None:
    run(
        CAPTURING
        + """
found = []
for number, batch in enumerate(loader_of(320, BACKENDS["threads"], device=KIND)):
    if number in (0, 9, 30):
        left = iter(range(200))  # the copying thread pins and copies the next batches meanwhile
        graph = captured(lambda: next(left, None) is not None)
    static.copy_(batch)
    del batch
    graph.replay()
    found.append(digest(out // 3))
assert torch.equal(torch.cat(found).cpu(), wanted(320))
"""
    )


def test_a_graph_from_before_the_first_batch_is_fed_by_the_loader() -> None:
    run(
        CAPTURING
        + """
graph, found = captured(lambda: False, "global"), []
for batch in loader_of(320, BACKENDS["threads"], device=KIND):
    static.copy_(batch)
    del batch
    graph.replay()
    found.append(digest(out // 3))
assert torch.equal(torch.cat(found).cpu(), wanted(320))
"""
    )


def test_a_batch_within_a_capture_is_refused_in_our_words() -> None:
    run(
        CAPTURING
        + """
iterator = iter(loader_of(160, BACKENDS["threads"], device=KIND))
first = digest(next(iterator))
try:
    captured(lambda: next(iterator) is not None)
except RuntimeError as error:
    assert "take batches outside the capture" in str(error), error
else:
    raise SystemExit("no error")
torch.cuda.synchronize()
right = wanted(160)
rest = torch.cat([digest(batch) for batch in iterator]).cpu()
assert torch.equal(first.cpu(), right[:8])
assert torch.equal(rest, right[-len(rest):])
"""
    )
