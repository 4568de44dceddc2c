"""Backends that come with hybridloader. The core reaches them through its registry only."""
