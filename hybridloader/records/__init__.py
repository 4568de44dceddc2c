"""Read-only containers of millions of records, which all processes share."""
