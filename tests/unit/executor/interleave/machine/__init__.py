"""The state machine of a worker's blocks: which instructions follow from which events."""
