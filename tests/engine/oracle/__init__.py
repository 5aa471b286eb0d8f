"""The oracle itself: what it holds values against, and how its names are bound."""
