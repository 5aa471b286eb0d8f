"""The way out of a worker."""
