"""Blocks in a vLLM engine on the CPU, in the test's own process."""
