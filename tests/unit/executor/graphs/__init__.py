"""Tests of the tables, the kernel, the graphs' cache and the decision, without an engine and without a GPU."""
