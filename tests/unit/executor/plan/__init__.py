"""Tests of `executor.plan`: plans run beside a tiny model of torch modules, against the greenlet run of the same block."""
