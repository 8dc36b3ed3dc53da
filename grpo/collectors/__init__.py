"""Collectors: rollouts for the trainer, on demand and ahead of it."""
