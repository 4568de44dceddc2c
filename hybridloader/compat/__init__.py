"""Torch's loaders on hybridloader's engine, for code that can't be edited."""
