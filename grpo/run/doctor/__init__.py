"""What of a machine and its packages would hold a run up: ``grpo doctor``."""
