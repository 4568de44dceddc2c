"""Operators of pipelines, a small class for each."""
