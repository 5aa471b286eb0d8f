"""What an engine replica does before and after the engine."""
