"""The manifests for Kubernetes against its schemas, and what `tools.k8s` finds in them."""
