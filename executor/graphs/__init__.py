"""Captured graphs of the uncompiled model with blocks in them.

Taps are universal and read tables; a cache keeps the graphs, and each step decides for a graph.

A tap is a read or a change of a request's rows at a site. A site is a tensor of a raw location, or a residual pair. The taps of
all requests lie in tables on the device (`tables`), and one kernel per site does what the tables say (`kernel` on CUDA,
`reference` on CPUs). So one graph per batch size serves any mixture of requests, and a request joins or leaves without a capture.

| file | holds |
| --- | --- |
| `operations` | what a tap does to a row, with the rounding of each operation |
| `extents`, `bank` | space on the device: a first-fit allocator, and the vectors of all tenants |
| `tables`, `records` | which request has which taps in this step, and where its rows are; what the kernel reads of its taps |
| `open_programs`, `shares` | which rows have an open program; what a step leaves for each request |
| `reference`, `kernel`, `taps` | the operations on the CPU and in Triton, and the hooks that call them between the modules |
| `ring`, `later`, `lines`, `buffers`, `tickets`, `pieces` | values on their way to the requests, one copy for many steps |
| `sites` | the forms of the model's values and its sites, found in one pass |
| `capture`, `cache`, `dispatch` | how a graph is captured, how many are kept, and which step replays which graph |
| `segments`, `chain` | passes that are broken where blocks wait that are no plans, and their graphs |
| `cells`, `lower` | a plan's program, followed without values, and made into taps where it has only these operations |
| `lengths` | the taps for a prompt's length, out of those for a shorter and a longer prompt |
| `by_rows`, `in_prompt` | whether a plan for a prompt is the plan for one row, run for each row; what that leaves |
| `merge` | the taps of a prompt's step and of the steps after it, each once |
| `operands` | what taps take from a plan's constants |
| `template` | the taps of a plan, before and after the constants of a request are known |
| `tail` | what the host computes of what taps read, when a loop is over |
| `programs` | other plans: programs between the modules, for all rows of a step at once |
| `hoist`, `thin`, `passes` | such a program without what needs constants alone, and copies; one pass of it through the model |
| `outside` | the part of a program at the logits and the samples, after the pass |
| `constants`, `emitted` | the large constants that requests share, and what a program leaves in a step, in the output |

`loops` has the loops of requests that run here. `table_loop` says what such a loop is, `joining` what runs for it, and `landing`
gives a block what its loop left. `executor.plugin.graphs` is
`dispatch.Device` in vLLM's V2 runner; on other runners the taps run at hooks, in eager steps. `CacheGuard.launch` stands at the
end of each graph. The KV cache is sized less `limits.device_bytes`. A model on pipeline stages has no tables.

Tensor-parallel ranks have tables of their own. A site is a tensor that each rank holds all of, so every rank runs the same taps
on the same numbers, and the rank that reports sends what its own taps have read. When a loop has gone into the tables, the ranks
compare what they run there with how the block's turn ended, and a loop that is not the same on all ranks comes out again. From
then on nothing is compared in a step. Which graph a step replays depends on the batch and on the loops alone. The ranks capture a
graph in the same step, and keep it if all of them could (`executor.plugin.captures`).
"""
