"""The tests, by cost: unit, engine, end to end; and the oracle that every value is compared with."""
