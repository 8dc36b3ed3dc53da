"""Starting vLLM so that its weights can be shared with the trainer."""
