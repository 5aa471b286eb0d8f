"""What every other part of the executor may use: errors, a block's location, and the request that a worker is given."""
