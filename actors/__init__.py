"""The actors between ingress and engines: sessions, and the directory that finds them."""
