"""The commands of `interpose`, without a service."""
