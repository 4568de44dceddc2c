"""Adapters for frameworks that rebuild loaders as torch loaders, one module each.

A module imports its framework only when one of its functions is called.
"""
