"""What the examples do without a service: their pictures, and what they refuse."""
