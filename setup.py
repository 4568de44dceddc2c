"""A shim for tools that still look for this file; all metadata is in setup.cfg."""

from setuptools import setup

setup()
