"""What a trace asks of an engine, and what the engine makes of it."""
