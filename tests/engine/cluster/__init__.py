"""How an engine finds Ray, what its processes are given, and why it does not start."""
