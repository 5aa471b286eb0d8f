"""What is published and deployed: the wheel, commands, documents, manifests and models of the demo."""
