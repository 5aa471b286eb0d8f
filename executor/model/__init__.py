"""The model as it lies on one rank: modules, rows of a step, layouts over the ranks."""
