"""Blocks taken from source text: what they read and write, and what is refused."""
