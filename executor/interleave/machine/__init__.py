"""The decisions of a worker about its blocks: events in, lists of instructions out."""
