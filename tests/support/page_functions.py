"""Functions of a user, as the examples on the pages name them. Importing them imports nothing else."""

from __future__ import annotations


def read(path: str) -> str:
    return path


def decode(path: str) -> list[float]:
    return [float(len(path))]


def augment(pixels: list[float]) -> tuple[list[float], int]:
    return pixels, 0
