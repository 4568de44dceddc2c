"""Read tar archives behind HTTP, stop in the middle, and go on elsewhere: python examples/remote_tar.py

Archives in the form of webdataset lie behind a local server, which stands for an object store. They are
indexed once, and samples are read by ranges of bytes, in random order. The loader stops after some
batches; another one, with other workers, goes on from its state. Together they had every sample once.
Needs: pip install -e ".[files]" (in the clone)
"""

import io
import json
import re
import tarfile
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hybridloader import DataLoader, Retry
from hybridloader.errors import StoreError
from hybridloader.sampling import BlockShuffleSampler
from hybridloader.sources import Tar

ARCHIVES, SAMPLES, BATCH = 4, 50, 8
"""Number of archives, of samples in each, and of samples in a batch."""


def archive(first):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for number in range(first, first + SAMPLES):
            label = json.dumps({"label": number % 10}).encode()
            for name, data in (
                (f"{number:06d}.txt", b"text " * number),
                (f"{number:06d}.json", label),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return packed.getvalue()


class Store(BaseHTTPRequestHandler):
    """Serves the archives, and ranges of them."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        data, status = self.server.files[self.path], 200
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            data, status = (
                data[int(asked[1]) : int(asked[2]) + 1 if asked[2] else None],
                206,
            )
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


def parse(sample):
    text, label = sample
    return len(text), json.loads(label)["label"]


def loader_of(url, index, workers):
    samples = Tar(
        f"{url}/train-{{00..{ARCHIVES - 1:02d}}}.tar",
        fields=("txt", "json"),
        decode=parse,
        index=index,
    )
    return DataLoader(
        samples,
        BATCH,
        sampler=BlockShuffleSampler(samples, seed=0, block_size=10, window_blocks=6),
        num_workers=workers,
        backend="threads",
        on_error=Retry(3, retry_on=StoreError),
    )


def main():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    server.files = {
        f"/train-{n:02d}.tar": archive(n * SAMPLES) for n in range(ARCHIVES)
    }
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    seen = []
    with tempfile.TemporaryDirectory() as index:
        first = loader_of(url, index, workers=2)
        with iter(first) as batches:
            for _ in range(10):
                seen += next(batches)[0].tolist()
            state = first.state_dict()
        print(f"stopped after {len(seen)} samples")
        second = loader_of(url, index, workers=1)
        second.load_state_dict(state)
        for lengths, _labels in second:
            seen += lengths.tolist()
    server.shutdown()
    server.server_close()
    assert sorted(seen) == [5 * number for number in range(ARCHIVES * SAMPLES)]
    print(f"and went on to {len(seen)}: every sample once")


if __name__ == "__main__":
    main()
