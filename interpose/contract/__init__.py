"""What notebook and server agree on: errors, names, limits, and a trace's values."""
