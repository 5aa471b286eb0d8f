"""Tests in milliseconds: no engine, no Ray."""
