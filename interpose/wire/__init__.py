"""Python objects as typed wire values and back, without pickle."""
