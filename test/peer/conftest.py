"""Comparisons with other systems, each in a Python of its own."""

# Not for our pytest: their imports are the peer's.
collect_ignore = ["atroposlib_checks"]
