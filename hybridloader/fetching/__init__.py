"""Work of a worker: from an index to a batch, and the handling of samples that fail."""
