"""Validates k8s/ for `make k8s-validate CRDS=DIR`: a cluster with KubeRay takes its objects."""
