"""Canonical views: the residual stream, heads, attention pattern and MLP parts, whatever the engine fused."""
