"""Policies of `on_error`: samples that fail are retried, replaced, skipped or raised."""
