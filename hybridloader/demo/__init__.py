"""The demo: real JPEG files, a small network that learns from them, and the backends side by side.

It is a program that uses the loader as any user would, by its public names only. Nothing outside
this folder imports it, except the command line when ``hybridloader demo`` is asked for.
"""
