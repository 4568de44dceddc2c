"""The way to a device: pinning, copying, and the thread that does both."""
