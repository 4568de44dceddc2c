"""Parts shared by the backends whose workers are processes."""
