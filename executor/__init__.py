"""Interposing in vLLM: the lazy Ray executor, its workers and runners, and the interleaver that runs users' blocks."""
