"""Tenants with quotas and their operator, over one service with two ingress replicas that writes metrics, logs and spans."""
