"""How new weights reach the engine, and the proof that they did."""
