"""Operators of pipelines, each a small class of its own."""
