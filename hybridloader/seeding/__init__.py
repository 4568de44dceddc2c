"""Random generators of workers and of samples."""
