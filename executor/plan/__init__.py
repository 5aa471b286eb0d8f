"""Blocks as tensor programs: eligibility, tracing, guards on the step, and runs of steps.

The way of a loop: `eligible` finds it in the block's text and refuses what no plan has. `choices` rewrites its decisions, and
`decide` takes both ways where a value of the model decides. `environment` walks over what the loop reads from before, and gives
it a fingerprint. `compile` runs the loop's body once on tensors without elements (`trace`, `record`) and makes a `Plan` (`ir`),
which `cache` keeps for all requests with that fingerprint. `run` runs it: `PlannedStep` for a batch of requests at the hooks,
`OwnStep` for one request on copies that it has already. `explain` says why a loop is no plan.

A worker runs plans through `executor.interleave.planned`, unless its model has `plans: false`. There each request is served its
own copies, as a greenlet is, so that agreement, write-back and accounting are the same. On a GPU `executor.graphs` takes a plan
further: as taps, or as a program for all rows. Not yet there:

- `PlannedStep` in a worker: the interleaver would group the requests that wait for one plan at one location, gather their rows
  once through `Layouts`, and give `Serving` the written rows for its digests, its tally and the cache guard.
- Blocks of the prompt's step (`Region.kind` "prompt") run in the tables, and no worker runs them as programs.
- Standing edits and modules that a block applies stay with the greenlet. Of several invokes in a trace, so do blocks that share
  what can change (`apart`).
"""
