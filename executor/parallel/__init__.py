"""What several ranks do together: agreement over tensor-parallel ranks, pipeline stages, and values that travel between them."""
