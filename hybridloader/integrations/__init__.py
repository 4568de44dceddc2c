"""Adapters for frameworks that rebuild loaders as torch's own, one module each.

A module imports its framework when one of its functions is called, not before.
"""
