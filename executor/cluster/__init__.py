"""The workers as processes of a Ray cluster: placement, start-up, liveness, and what they share."""
