"""The decisions of a worker about its blocks: typed events in, lists of instructions out, and nothing of vLLM or torch."""
