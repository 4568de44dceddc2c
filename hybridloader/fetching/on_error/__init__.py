"""Policies of `on_error`: samples that fail are tried again, replaced, skipped or raised."""
