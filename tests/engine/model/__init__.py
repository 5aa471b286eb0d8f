"""What a module takes and gives, its weights, and what may be done with it."""
