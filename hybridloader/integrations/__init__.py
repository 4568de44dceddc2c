"""Adapters for frameworks that rebuild loaders as torch's own, one module each.

Each imports its framework only when it is asked to do something; nothing else here imports one.
"""
