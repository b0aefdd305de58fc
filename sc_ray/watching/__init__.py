"""Where a run's metrics go: its own file first, then to services that may be slow or fail."""
