"""Processes, threads, ports and HTTP: nothing here knows of reinforcement learning."""
