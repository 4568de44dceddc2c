"""Cases, one module for each group: the work, who takes part, the measurement and the targets."""
