"""Demo: real JPEG files, a small network that learns from them, and the backends side by side.

It uses the loader by its public names only, as any user would.
"""
