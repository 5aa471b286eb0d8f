"""Tests of the way of a call into the service."""
