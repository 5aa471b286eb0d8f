"""The Ray Serve application: settings, builder, gRPC ingress, and engine deployment."""
