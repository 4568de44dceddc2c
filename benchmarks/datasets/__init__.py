"""Datasets that the cases load."""
