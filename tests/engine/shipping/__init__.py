"""Functions, classes and objects of the user's own, sent to a worker and back without an engine."""
