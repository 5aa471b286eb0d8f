"""What the notebook and the server agree on, as a notebook meets it: names, limits, sampling, what a trace gives back."""
