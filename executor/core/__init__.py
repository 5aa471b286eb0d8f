"""What every other folder of the executor may use: errors, locations, requests."""
