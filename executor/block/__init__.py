"""One running block: its fiber, the names it sees, what it may use, and what it is told."""
