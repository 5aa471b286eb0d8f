"""The way of a call into the service: Serve's proxy, the ingress, its replies and its health."""
