"""Blocks in sandboxed processes, which have nothing of the worker's."""
