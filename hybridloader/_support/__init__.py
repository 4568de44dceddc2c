"""Support that knows nothing of loading."""
