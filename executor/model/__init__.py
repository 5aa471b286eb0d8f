"""The model as it lies on one rank: modules, the rows of a step, how values are cut over the ranks, what a module computes."""
