"""Policies: prompt tokens in, response tokens with log-probs out; starting and ending an engine."""
