"""Canonical views without an engine."""
