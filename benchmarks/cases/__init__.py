"""Cases, one module for each group: the work, the loaders, the measurement and the targets."""
