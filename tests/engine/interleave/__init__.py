"""Blocks of several requests beside each other in the model's forward pass."""
