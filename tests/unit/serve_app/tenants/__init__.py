"""Tests of what a tenant may do."""
