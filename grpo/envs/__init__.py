"""Environments: ``EnvBase`` with dense observations, their tasks and rewards."""
