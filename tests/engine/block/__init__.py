"""What the code of a block may do, what it is told, and what it may not do."""
