"""What people see of a run: screen, files, loggers, curves and the page."""
