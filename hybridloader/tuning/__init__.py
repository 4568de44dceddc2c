"""Tuning: measured choice of workers for a loader or a pipeline, from its public attributes alone."""
