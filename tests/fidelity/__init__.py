"""Measures every location against transformers under every condition, and writes the table of docs/fidelity.md."""
