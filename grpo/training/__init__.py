"""Training: the loop, the optimizer, checkpoints, ranks, and the held-out problems."""
