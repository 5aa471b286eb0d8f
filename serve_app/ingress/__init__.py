"""The way of a call into the service: the gate, the ingress, its replies and its health."""
