"""Blocks captured by each Python interpreter that is installed, and in whatever runs code that is in no file."""
