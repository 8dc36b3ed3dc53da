"""Every option of a run, its type and its default."""
