"""The image for CPUs, built and run with docker-compose.yml."""
