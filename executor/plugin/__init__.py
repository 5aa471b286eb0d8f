"""Everything that is built into vLLM: the worker, the model runners, the scheduler and their configuration."""
