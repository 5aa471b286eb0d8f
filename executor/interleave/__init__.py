"""The forward pass and the blocks of its requests in turn: admission, serving at a location, barriers, and the end."""
