"""A pipeline that runs: its plan, its lines and stages, its metrics."""
