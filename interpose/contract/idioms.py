"""Names of other tools that interpose does not have, and the code to write instead."""

from __future__ import annotations

GRADIENTS = (
    "no gradient goes through the served model, which runs in inference mode. A block can differentiate its own computation, on "
    "copies: `with torch.enable_grad():`, x = value.clone().requires_grad_(), …, loss.backward(), x.grad"
)
_HOOK = "there are no hooks to add: write the change in a block, `with model.trace(prompt):`, e.g. module.output[:] = 0"
_WEIGHTS = "weights are read in a block by their names, one by one: model.lm_head.weight[token].save(); print(model) shows them"
_SERVED = "the model is where it is served, in the type and on the device it was started with; leave this out"
_TOKENS = "use the tokenizer: model.tokenizer.encode(text), model.tokenizer.decode(ids)"
_CANONICAL = "weights go by the model's own names, see print(model); values go by model.blocks[i].attn.q, .mlp.act, .resid_post …"

OF_MODELS = {
    "run_with_cache": (
        "write `with model.trace(prompt) as tracer:` and cache = tracer.cache() in it; then cache.model.layers[2].output"
    ),
    "run_with_hooks": _HOOK,
    "hooks": _HOOK,
    "add_hook": _HOOK,
    "add_perma_hook": "an edit stays on the server: `with model.edit(name):`, then model.trace(prompt, edits=[name])",
    "reset_hooks": "edits are cleared by model.clear_edits(); the changes of a block end with its trace",
    "register_forward_hook": _HOOK,
    "register_forward_pre_hook": _HOOK,
    "register_full_backward_hook": GRADIENTS,
    "forward": "a module is applied to values in a block by calling it: model.lm_head(h)",
    "requires_grad_": GRADIENTS,
    "requires_grad": GRADIENTS,
    "backward": GRADIENTS,
    "grad": GRADIENTS,
    "zero_grad": GRADIENTS,
    "parameters": _WEIGHTS,
    "named_parameters": _WEIGHTS,
    "state_dict": _WEIGHTS,
    "W_E": _CANONICAL,
    "W_U": _CANONICAL,
    "W_Q": _CANONICAL,
    "W_K": _CANONICAL,
    "W_V": _CANONICAL,
    "W_O": _CANONICAL,
    "W_in": _CANONICAL,
    "W_out": _CANONICAL,
    "named_modules": "print(model) shows the modules; a block names them as attributes: model.model.layers[2].mlp",
    "modules": "print(model) shows the modules; a block names them as attributes: model.model.layers[2].mlp",
    "children": "print(model) shows the modules; a block names them as attributes: model.model.layers[2].mlp",
    "cfg": "the model's configuration is model.config, a dict",
    "session": "a session belongs to the connection: `with client.session():`",
    "to_tokens": _TOKENS,
    "to_string": _TOKENS,
    "to_str_tokens": _TOKENS,
    "to_single_token": _TOKENS,
    "eval": _SERVED,
    "train": _SERVED,
    "to": _SERVED,
    "cuda": _SERVED,
    "half": _SERVED,
    "device": _SERVED,
    "dtype": _SERVED,
}

_OF_TRACES = "belongs to the whole trace: model.trace("
_READ = "read it in the block: model.blocks[i].resid_post, model.blocks[i].attn.pattern, model.logits.output"
OF_TRACES = {
    "edits": f"edits {_OF_TRACES}…, edits=[…])",
    "stream": f"stream {_OF_TRACES}…, stream=True)",
    "blocking": f"blocking {_OF_TRACES}…, blocking=False)",
    "explain": f"explain {_OF_TRACES}…, explain=True)",
    "fetch": f"fetch {_OF_TRACES}…, fetch=False)",
    "remote": "every trace runs where the model is served, so there is no remote; leave it out",
    "scan": "for shapes alone write `with model.scan(prompt):`; leave scan out",
    "validate": "the names that a block uses are always checked; leave validate out",
    "backend": "the server of the connection runs the trace; leave backend out",
    "hook": _HOOK,
    "hooks": _HOOK,
    "fwd_hooks": _HOOK,
    "names_filter": "tracer.cache(modules=[…]) in the block records the modules that it names",
    "stop_at_layer": "tracer.stop() in the block ends the request there",
    "do_sample": "do_sample=False is temperature=0.0 here",
    "num_return_sequences": "num_return_sequences is n here",
    "num_beams": "the engine has no beam search; n=… samples several sequences",
    "max_length": "max_length is max_tokens here, and counts the new tokens alone",
    "eos_token_id": "eos_token_id is stop_token_ids=[…] here",
    "streamer": "write model.trace(…, stream=True) and read tracer.stream() after the block",
    "output_hidden_states": _READ,
    "output_attentions": _READ,
    "output_scores": _READ,
    "return_dict_in_generate": "what was generated is tracer.result: .text, .token_ids, .logprobs",
}

OF_TRACERS = {
    "next": "modules have next(): model.model.layers[2].next(); steps are `for step in tracer.iter[:]`",
    "edit": "an edit is made by model.edit(name)",
    "session": "a session belongs to the connection: `with client.session():`",
    "apply": "functions are called in the block as anywhere: f(x)",
    "grad": GRADIENTS,
    "backward": GRADIENTS,
    "output": "what was generated is tracer.result: .text, .token_ids",
    "save": "values are saved, not the tracer: hidden = model.model.layers[2].output[0].save()",
}

_ONE = "the result is one sequence: result.text, result.token_ids, result.finish_reason"
OF_RESULTS = {
    "outputs": _ONE,
    "sequences": _ONE,
    "choices": _ONE,
    "generated_text": _ONE,
    "prompt": "the result has the prompt's ids: result.prompt_token_ids",
    "logits": "logits are read in the block: logits = model.logits.output.save(); logprobs=5 gives result.logprobs",
    "scores": "logits are read in the block: logits = model.logits.output.save(); logprobs=5 gives result.logprobs",
    "hidden_states": "hidden states are read in the block: h = model.blocks[2].resid_post.save()",
    "past_key_values": "the engine keeps keys and values; model.blocks[2].attn.k in a block reads those of a step",
}
