"""Statistics of loaders and pipelines: what waited for what, and what to change."""
