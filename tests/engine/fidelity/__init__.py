"""Every value and every change against transformers, and the page of what was measured."""
