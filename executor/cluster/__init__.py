"""Workers as processes of a Ray cluster: placement, start-up, liveness, shared memory."""
