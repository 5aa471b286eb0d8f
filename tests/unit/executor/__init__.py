"""The executor without an engine."""
