"""Read-only containers of millions of records, once for all processes."""
