"""The stacks of any model that reads text: a causal decoder, an encoder, or the two halves of an encoder–decoder.

As with a causal decoder (`loading.verify`): the layers and memories are recognised by role, and one pass verifies that
the parts found give what the model computes. What is not recognised is refused, and the error lists what was found.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ffedit.errors import EditError, ModelError
from ffedit.loading.verify import find_and_verify, longest_input, product_error
from ffedit.model import offload
from ffedit.model.editable import Kind, Stack
from ffedit.model.feed_forward import FeedForward
from ffedit.model.hooks import calls, capture, capture_returned, leaves
from ffedit.model.roles import Layer, find_memory

HALVES: tuple[Kind, Kind] = ("encoder", "decoder")


def stacks(
    model: Any, tokenizer: PreTrainedTokenizerBase, name: str = "model", value_matrix: str | None = None
) -> list[Stack]:
    """Return the stacks of any transformers model that reads text, the encoder first.

    Args:
        model: a causal decoder, an encoder, or an encoder–decoder, in evaluation mode.
        tokenizer: its tokenizer.
        name: its name in messages.
        value_matrix: path of the value matrix, where no known role fits, as of `find_and_verify`.

    Raises:
        ModelError: a part cannot be recognised or verified.
    """
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"{name}: a transformers model is needed, found {type(model).__name__}")
    if model.config.is_encoder_decoder:
        return [_stack(model, tokenizer, name, half, value_matrix) for half in HALVES]
    if model.can_generate():
        return [find_and_verify(model, tokenizer, name, value_matrix)]
    return [_stack(model, tokenizer, name, "encoder", value_matrix)]


def chosen(some: list[Stack], name: str | None) -> Stack:
    """Return the stack of a model that is called `name`; its only one where `name` is None.

    Raises:
        EditError: there is none of this name, or several and `name` is None.
    """
    there = " and ".join(f"{'an' if stack.kind == 'encoder' else 'a'} {stack.kind}" for stack in some)
    if name is None and len(some) > 1:
        raise EditError(f"{some[0].name} has {there}; say which one with --stack encoder or --stack decoder")
    found = next((stack for stack in some if name in (None, stack.kind)), None)
    if found is None:
        raise EditError(f"{some[0].name} has {there} and no other stack; leave --stack {name} out")
    return found


def _stack(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, kind: Kind, value_matrix: str | None
) -> Stack:
    """Recognise and verify the one list of layers in an encoder, or in one half of a pair."""
    if not offload.is_loaded(model):
        raise ModelError(f"{name}: some weights are not loaded (meta device); load the model whole")
    pair = model.config.is_encoder_decoder
    body = model.base_model if not pair else model.get_encoder() if kind == "encoder" else model.get_decoder()
    lists = {path: module for path, module in body.named_modules() if isinstance(module, nn.ModuleList)}
    outermost = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    if len(outermost) != 1:
        raise ModelError(
            f"{name}: one list of layers was expected in {type(body).__name__}, found {', '.join(outermost) or 'none'}"
        )
    layers = list(lists[outermost[0]])
    made = Stack(model, tokenizer, name, layers, kind=kind, max_tokens=longest_input(body.config, body, 512))
    for i, layer in enumerate(layers):
        memory = find_memory(Layer(model, layer, i, name, made.probe, value_matrix))
        made.feed_forward.append(FeedForward(i, memory.module, (memory,)))
    values = {memory.address: memory.module for memory in made.memories.values()}
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = [module for module in leaves(body) if id(module) not in inside]
    with (
        capture(values, inputs=True) as keys,
        capture(values) as outputs,
        capture({0: layers[-1]}) as last,
        capture_returned(layers[-1]) as whole,
        calls(outside) as around,
    ):
        made.probe()
    if not torch.isfinite(last[0]).all():
        raise ModelError(f"{name}: the numbers of its {kind} are not finite; a sound checkpoint was expected")
    for memory in made.memories.values():
        product_error(memory, keys[memory.address], outputs[memory.address], last[0].shape[-1], name)
    made.layer_outputs = len(whole[0]) if isinstance(whole[0], tuple) else 0
    norm = next((module for module, x, _ in around if torch.equal(x, last[0])), None)
    made.norm = next((path for path, module in model.named_modules() if module is norm), "")
    return made
