"""Names that are read from the engine's source."""
