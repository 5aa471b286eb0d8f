"""What of the notebook goes into a trace."""
