"""Canonical views: the residual stream, heads, attention pattern and parts of the MLP.

They mean the same under every architecture, whatever the engine fused.
"""
