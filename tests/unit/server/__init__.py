"""The server without an engine: executor, service and actors."""
