"""The Ray Serve application: settings, builder, gRPC ingress, and the deployment that holds an engine."""
