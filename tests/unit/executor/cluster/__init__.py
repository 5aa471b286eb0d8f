"""Processes of a Ray cluster, without a cluster."""
