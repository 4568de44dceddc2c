"""Where a pass has come to, and how one begins there: of loaders and of pipelines."""
