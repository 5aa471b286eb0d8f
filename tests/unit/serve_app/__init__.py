"""The service without Serve: settings, admission, the gate, and the deployments."""
