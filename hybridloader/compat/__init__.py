"""Running of torch's own loaders on our engine, for code that can't be edited."""
