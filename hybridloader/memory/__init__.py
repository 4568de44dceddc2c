"""Memory that batches are made in and sent through, and what is packed into it."""
