"""From the configuration to a run: its parts, its devices, its commands."""
