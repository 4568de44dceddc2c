"""Correctness and speed on a device, by ``python -m benchmarks.device``."""
