"""Tests of what is built into vLLM, without vLLM."""
