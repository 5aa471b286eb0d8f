"""What the notebook and the server agree on: errors, names, limits, and the values that a trace gives back."""
