"""Loaders that take part: of torch, hybridloader and other projects, opened for the same work."""
