"""What fails, and what becomes of it: samples, workers, tasks that take too long."""
