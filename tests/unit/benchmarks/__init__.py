"""The benchmarks of blocks: their rows, their groups, and the tables and pictures that are made of their results."""
