"""The forward pass and the blocks of its requests in turn: a state machine and its driver."""
