"""Calls to the server over gRPC: channel, sessions, transfers, and unbroken streams."""
