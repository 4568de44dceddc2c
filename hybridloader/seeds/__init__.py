"""Random numbers: as torch seeds them, and by sample."""
