"""Calls to the server over gRPC: the channel, sessions, transfers, and streams that survive a broken connection."""
