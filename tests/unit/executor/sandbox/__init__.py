"""Sandboxed processes without an engine: a small model of torch, a worker's interleaver, and a real zygote."""
