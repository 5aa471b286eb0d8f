"""vLLM's scheduler, runners and kernels with traces in them."""
