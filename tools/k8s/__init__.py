"""`make k8s-validate CRDS=DIR`: what is in k8s/ is what a cluster with KubeRay would take, and fits together."""
