"""Captured blocks become a `Trace` message."""
