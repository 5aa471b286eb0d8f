"""What the code of a block may do, what it may not do, and the errors that a block gets."""
