"""The backends that come along with hybridloader. The core reaches them through its registry only."""
