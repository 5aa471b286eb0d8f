"""A block's names, its fiber, and its watchdog."""
