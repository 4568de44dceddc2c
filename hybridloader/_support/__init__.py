"""Helpers that know nothing of loading."""
