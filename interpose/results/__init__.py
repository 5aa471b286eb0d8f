"""What comes back from a trace: events, saved values, streams, and jobs."""
