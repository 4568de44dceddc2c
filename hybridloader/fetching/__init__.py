"""Work of a worker: from an index to a batch, and what becomes of samples that fail."""
