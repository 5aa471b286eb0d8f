"""A block's names, its strand, and its watchdog."""
