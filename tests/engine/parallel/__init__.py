"""Several pipeline stages."""
