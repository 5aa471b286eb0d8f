"""The oracle is the truth that every value of the system is compared with: transformers' eager float32 forward.

`Oracle` runs a checkpoint in transformers and reports each value under the name and in the layout that vLLM gives it,
so that a test compares a trace with it directly:

    oracle = Oracle(checkpoint)
    truth = oracle.run([1, 2, 3], steps=4)
    truth.tokens                                        # greedy, 4 of them
    truth.logits[0]                                     # [1, vocab], float32: what token 0 was chosen from
    truth.value("model.layers.0.mlp", step=2)           # [1, hidden]; step 0 is the prefill with all prompt rows
    truth.value("model.layers.0.mlp.down_proj", "input")

    zero = Edit("model.layers.1.mlp", "output", lambda value: value * 0)
    oracle.run([1, 2, 3], steps=4, edits=[zero])        # the same intervention, done with transformers' hooks

Steps go through a key/value cache as in an engine: an edit in step 0 reaches later steps through the keys and values
that were cached then. Generation never stops early, whatever the tokens are; run the engine with `ignore_eos=True`.

`locations(checkpoint)` lists everything that can be compared and edited. Where transformers and vLLM disagree about
what a module returns, the layout is vLLM's:

* values are flat rows `[tokens, width]`, without a batch dimension;
* a linear layer returns `(output, None)`; its second element is a bias that was not added, always None here;
* all but gpt2 fuse projections: `qkv_proj` returns `[q | k | v]`, and where an MLP has a gate, `gate_up_proj` returns
  `[gate | up]`;
* llama and its descendants (qwen, gemma, the mixtures of experts) carry the residual stream as a pair: a block returns
  `(what its MLP adds, the stream before that)`, whose sum is what a transformers block returns. Norms add before they
  normalise: they take the pair and return `(normalised, sum)`, so a norm's input (its first argument) is what the
  attention or the MLP before it added. Only the first block's `input_layernorm` gets one tensor, the embeddings, and
  returns one. gemma's norms of what is added are given one tensor and return one, and its embeddings are scaled after
  `embed_tokens` has returned them;
* a block of stablelm or cohere returns `(the stream, what the stream was before the last addition)`; cohere's norms pass the
  second on beside what they return, and nothing uses it;
* a router returns logits alone;
* `self_attn` and gpt2's `attn` return one tensor, without attention weights;
* `logits` has the one row that the next token is chosen from.

Left out on purpose: a llama or gptj block's first argument is the positions and an attention module takes keywords only, so
their `.input` is no activation (`tests/fidelity` compares all of what they are given); `rotary_emb` and some activation
modules are one object shared by all layers, which no single layer's value could be named after.
"""

from tests.oracle.location import Edit, Location, Reference, difference
from tests.oracle.model import Oracle, locations

__all__ = ["Edit", "Location", "Oracle", "Reference", "difference", "locations"]
