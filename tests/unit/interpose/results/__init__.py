"""What comes back from a trace: outputs as they come, and jobs."""
