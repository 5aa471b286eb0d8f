"""What several ranks do together: agreement, pipeline stages, and values that travel."""
