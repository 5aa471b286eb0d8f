"""Blocks as tensor programs: eligibility, tracing, guards on the step, and runs of steps.

The way of a loop: `eligible` finds it in the block's text and refuses what no plan has. `environment` walks over what the loop
reads from before, and gives it a fingerprint. `compile` runs the loop's body once on tensors without elements (`trace`, `record`)
and makes a `Plan` (`ir`), which `cache` keeps for all requests with that fingerprint. `run` runs it: `PlannedStep` for a batch of
requests at the hooks, `OwnStep` for one request on copies that it has already. `explain` says why a loop is no plan.

A worker runs plans through `executor.interleave.planned` when its model has `plans: true`. There each request is served its own
copies, as a greenlet is, so that agreement, write-back and accounting are the same. Not yet there:

- `PlannedStep` in a worker: the interleaver would group the requests that wait for one plan at one location, gather their rows
  once through `Layouts`, and give `Serving` the written rows for its digests, its tally and the cache guard.
- Graphs: `Plan.functional` is what a captured graph holds. Its inputs from locations are the rows `[1, ...]` of one request,
  under `torch.func.vmap`. A matrix product in a batch is not the greenlet's to the last bit, so a graph says how far it is off.
- Blocks of the prompt's step (`Region.kind` "prompt") have plans and are tested, and no worker runs them.
- Standing edits and modules that a block applies stay with the greenlet. Of several invokes in a trace, so do blocks that share
  what can change (`apart`).
"""
