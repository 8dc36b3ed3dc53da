"""Evaluating and comparing models outside of training: ``python -m grpo.run.evaluate``."""
