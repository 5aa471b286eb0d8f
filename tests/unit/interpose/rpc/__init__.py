"""Calls to a server: connections, errors, transfers, and streams that break."""
