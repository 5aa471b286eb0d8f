"""What a notebook writes: clients, models, tracers and the `with` blocks of a trace."""
