"""``python -m benchmarks``, beside torch's loader and its rivals. See docs/benchmarks.md."""
