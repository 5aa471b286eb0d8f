"""Canonical values, and how they are found in a model."""
