"""Modules that several test modules share."""
