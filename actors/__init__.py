"""The actors between the ingress and the engines: sessions, and the directory that finds them."""
