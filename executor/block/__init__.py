"""One running block: its fiber, the names it sees, its limits, and the errors it gets."""
