"""What a notebook shows of the client: tab completion, and tracebacks."""
