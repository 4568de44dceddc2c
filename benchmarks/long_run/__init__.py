"""Two hours of mixed work with faults, and whether anything grows. Started by its own command."""
