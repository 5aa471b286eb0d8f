"""The lowest versions of the dependencies that pyproject.toml allows."""
