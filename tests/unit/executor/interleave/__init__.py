"""The interleaver without an engine."""
