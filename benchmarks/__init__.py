"""Benchmarks: ratios against torch's loader, measured side by side in one run. Not installed."""
