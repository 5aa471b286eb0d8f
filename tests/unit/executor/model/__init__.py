"""Values and weights of modules that are made for the test."""
