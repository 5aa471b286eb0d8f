"""The client against a scripted server in the same process."""
