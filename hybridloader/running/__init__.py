"""A pipeline that runs: its plan, its passes and stages, its metrics."""
