"""Blocks as tensor programs: eligibility, tracing, guards on the step, and runs without a greenlet per step."""
