"""Everything that is built into vLLM: worker, model runners, scheduler and configuration."""
