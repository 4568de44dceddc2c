"""Memory in which batches are made and sent, and the packing of values into it."""
