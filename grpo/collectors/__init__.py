"""Collectors: rollouts for the trainer."""

from grpo.collectors.sync import SyncCollector

__all__ = ["SyncCollector"]
