"""P18: two hours of mixed work with faults, and whether anything grows.

Started by its own command, ``python -m benchmarks.long_run``, since it takes that long.
"""
