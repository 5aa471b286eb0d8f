"""What operators see: counts, lines, spans."""
