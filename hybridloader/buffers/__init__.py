"""Memory that batches are made in, sent through and collated into."""
