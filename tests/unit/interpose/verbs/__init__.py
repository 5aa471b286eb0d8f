"""What the experiments do without a service: prompts, tokens, and what they refuse."""
