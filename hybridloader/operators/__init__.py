"""The steps that a pipeline can be made of, each a small class of its own."""
