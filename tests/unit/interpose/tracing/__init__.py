"""What a notebook writes: the `with` blocks of traces, sessions and edits."""
