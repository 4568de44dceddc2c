"""Pinning of batches, and copying them to a device."""
