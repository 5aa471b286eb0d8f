"""Errors, names and stages that all of the executor knows."""
