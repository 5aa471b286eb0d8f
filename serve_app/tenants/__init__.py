"""What a tenant may do: its keys, the checks of what it sends, and its turn at an engine."""
