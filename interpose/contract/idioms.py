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
        "write `with model.trace(prompt) as tracer:` and cache = tracer.cache() in it; then cache.model.layers[2].output; or "
        "interpose.compat.transformer_lens.HookedModel(model).run_with_cache(prompt)"
    ),
    "run_with_hooks": f"{_HOOK}; or interpose.compat.transformer_lens.HookedModel(model).run_with_hooks(prompt, fwd_hooks=[…])",
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
    "W_pos": _CANONICAL,
    "W_gate": _CANONICAL,
    "b_Q": _CANONICAL,
    "b_K": _CANONICAL,
    "b_V": _CANONICAL,
    "b_O": _CANONICAL,
    "b_U": _CANONICAL,
    "QK": _CANONICAL,
    "OV": _CANONICAL,
    "ln_final": "the norm before the unembedding is model.final_norm, with .input and .output",
    "hook_dict": "print(model) shows the modules, and print(model.blocks) the canonical values",
    "set_use_attn_result": "no head's own result is computed; multiply blocks[i].attn.z with the output projection's weight",
    "set_use_split_qkv_input": "attention has one input for its projections here; change attn.q, attn.k or attn.v",
    "set_use_hook_mlp_in": "the input of the MLP's norm is blocks[i].resid_mid, what the norm gives is blocks[i].mlp_in",
    "loss_fn": "prompt_logprobs=1 gives tracer.result.prompt_logprobs, whose mean is minus the loss",
    "tokens_to_residual_directions": "read rows of the unembedding in a block: model.lm_head.weight[token].save()",
    "from_pretrained": "the server has loaded the model: client.model(name)",
    "remove_all_hook_fns": "edits are cleared by model.clear_edits(); the changes of a block end with its trace",
    "iter": "steps belong to the tracer: `for step in tracer.iter[:]:` inside the block",
    "all": "steps belong to the tracer: `for step in tracer.all():` inside the block",
    "cache": "a cache belongs to the tracer: cache = tracer.cache(modules=[…]) inside the block",
    "stop": "the tracer stops a request: tracer.stop() inside the block",
    "generator": "what was generated is tracer.result: .text, .token_ids",
    "source": "operations inside a module have no names here; its parts have: print(model), print(model.blocks)",
    "local_model": "the model is where it is served; transformers loads it here: AutoModelForCausalLM.from_pretrained(…)",
    "dispatch": _SERVED,
    "rename": "modules keep the engine's names; model.blocks[i] has the same names for every architecture",
    "nns_output": "the module's own child is reached by its path; values are .output and .input",
    "nns_input": "the module's own child is reached by its path; values are .output and .input",
    "export_edits": "a standing edit stays on the server under its name; model.edits() lists names and sources",
    "import_edits": "a standing edit stays on the server under its name; model.edits() lists names and sources",
    "get": "modules are attributes: model.model.layers[2]; print(model) shows them",
    "set_device": _SERVED,
    "unit_keys": "print(model) shows the modules, and print(model.blocks) the canonical values",
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
    "value": "values are saved, not the tracer: hidden = model.model.layers[2].output[0].save()",
    "cond": "conditions are plain Python in a block: `if …:`",
    "iterator": "steps are `for step in tracer.iter[:]:`",
    "invoker": "a prompt is added by `with tracer.invoke(prompt):`",
    "backend": "the server of the connection runs the trace",
    "exit": "tracer.stop() in the block ends the request",
    "close": "tracer.stop() in the block ends the request",
    "text": "what was generated is tracer.result: .text, .token_ids",
    "token_ids": "what was generated is tracer.result: .text, .token_ids",
}

OF_SESSIONS = {
    "trace": "a trace belongs to a model: `with model.trace(prompt):` inside the session's block",
    "generate": "a generation belongs to a model: model.generate(prompt, max_new_tokens=n)",
    "iter": "the session's block runs in the notebook: write a Python loop around the traces",
    "log": "the session's block runs in the notebook: write print(…)",
    "cond": "the session's block runs in the notebook: write `if …:`",
    "stop": "the session's block runs in the notebook: leave it as any other Python code",
    "result": "saved values are in the notebook's names after each trace; s.saved() gives them by name",
}

OF_CLIENTS = {
    "trace": "a trace belongs to a model: `with client.model().trace(prompt):`",
    "generate": "a generation belongs to a model: client.model().generate(prompt, max_new_tokens=n)",
    "edit": "an edit belongs to a model: `with client.model().edit(name):`",
    "load": "the server has loaded its models: client.models, client.model(name)",
    "completions": "write client.model().generate(prompt, max_new_tokens=n).text",
    "chat": "write client.model().generate([{'role': 'user', 'content': …}], max_new_tokens=n).text",
}

_MODELS = "a server has the model: client = interpose.connect(address), model = client.model(name)"
_BY_NAME = "a name of a value is an attribute here: model.blocks[3].resid_post; interpose.compat.transformer_lens has hook names"
OF_PACKAGE = {
    "LanguageModel": _MODELS,
    "NNsight": _MODELS,
    "VLLM": _MODELS,
    "VisionLanguageModel": _MODELS,
    "HookedTransformer": f"{_MODELS}; then interpose.compat.transformer_lens.HookedModel(model)",
    "TransformerBridge": f"{_MODELS}; then interpose.compat.transformer_lens.HookedModel(model)",
    "IntervenableModel": _MODELS,
    "IntervenableConfig": "an intervention is code in a block: model.blocks[3].resid_post[-1] = value",
    "RepresentationConfig": "an intervention is code in a block: model.blocks[3].resid_post[-1] = value",
    "VanillaIntervention": "an intervention is code in a block: model.blocks[3].resid_post[-1] = value",
    "CONFIG": "write interpose.connect(address, api_key), or set INTERPOSE_ADDRESS and INTERPOSE_API_KEY",
    "trace": "a trace belongs to a model: `with model.trace(prompt):`",
    "session": "a session belongs to the connection: `with client.session():`",
    "list": "a list that outlives its block is [].save()",
    "dict": "a dict that outlives its block is {}.save()",
    "log": "print(…) in a block arrives in the notebook",
    "apply": "functions are called in the block as anywhere: f(x)",
    "local": "every trace runs where the model is served; code outside the block runs in the notebook",
    "cond": "conditions are plain Python in a block: `if …:`",
    "ActivationCache": "tracer.cache() in a block records modules; interpose.compat.transformer_lens has run_with_cache",
    "utils": _BY_NAME,
    "patching": "patching is an assignment in a block: model.blocks[3].resid_post[position] = value; see docs/experiments.md",
}

# Attributes that users of other tools read of a value in a block, which is a tensor.
OF_VALUES = {
    "value": "a value in a block is the tensor itself; leave .value out",
    "node": "a value in a block is the tensor itself, no node of a graph",
    "_value": "a value in a block is the tensor itself; leave ._value out",
    "item_": "write .item()",
}

OF_EDITS = {
    "inplace": "an edit has a name and stays on the server; leave inplace out, and name the edit in a trace: edits=[name]",
    "hook": _HOOK,
    "validate": "the names that a block uses are always checked; leave validate out",
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
