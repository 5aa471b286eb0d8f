"""Runs blocks in vLLM: the lazy Ray executor, its workers and runners, the interleaver."""
