"""What runs inside the engine's workers."""
