"""Several replicas, models and nodes, and what is lost of them."""
