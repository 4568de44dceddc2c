"""`DataLoader`: the drop-in for torch's, on the engine."""
