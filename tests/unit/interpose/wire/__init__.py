"""Python objects on the way over the wire and back."""
