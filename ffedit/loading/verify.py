"""Find a model's feed-forward memories: ask, recognise, verify.

*Ask* transformers for the decoder and the unembedding; *recognise* the layers (the decoder's one list of
`num_hidden_layers` modules) and in each the value matrix by its role in the feed-forward block; *verify* with one
forward pass that each value matrix satisfies W k + b = observed output, and that a recorded pass resumed from the
middle gives the logits of the whole pass. Parts that are not recognised are refused; the error lists what was found.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ffedit.errors import ModelError, brief
from ffedit.inference import contexts, replay
from ffedit.model import storage
from ffedit.model.discover import Layer, find_attention, find_feed_forward, find_layers
from ffedit.model.editable import Editable
from ffedit.model.experts import Mixture, Routed
from ffedit.model.feed_forward import FeedForward
from ffedit.model.hooks import capture
from ffedit.model.memory import KeyValueMemory

# Errors of a model that cannot be run with these inputs.
RUN_ERRORS = (TypeError, ValueError, RuntimeError, LookupError, AttributeError)
# Rows of a value matrix that are converted to float32 at once; new memory for all takes longer than the product.
BLOCK = 256


def find_and_verify(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    name: str = "model",
    value_matrix: str | None = None,
    saved_dtype: torch.dtype | None = None,
) -> Editable:
    """Find and verify the parts of `model`, a causal decoder of transformers, compiled or not, in any mode.

    `name` is its name in messages, and `value_matrix` the path of the value matrix, if no known role fits: inside a
    layer (`ff.out`), or in the model, with {} for the layer's number (`layers.{}.ff.out`). `saved_dtype` is the
    precision of the checkpoint, if it is not that of the weights in memory.

    Raises ModelError if the model is no causal decoder, holds NaN, or a part cannot be recognised or verified.
    """
    model = _transformers_model(model, name)
    if model.config.is_encoder_decoder or model.get_output_embeddings() is None:
        raise ModelError(f"{name}: {type(model).__name__} is not a causal decoder (no unembedding, or an encoder)")
    config = model.config.get_text_config()
    layers = find_layers(model.get_decoder(), name, config.num_hidden_layers)
    editable = Editable(model, tokenizer, name, layers, attention=find_attention(layers))
    longest = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
    editable.max_tokens = next((int(n) for n in longest if n), editable.max_tokens)
    editable.feed_forward = [
        find_feed_forward(Layer(model, layer, i, name, editable.probe, value_matrix, saved_dtype))
        for i, layer in enumerate(layers)
    ]
    _verify(editable)
    return editable


def _transformers_model(model: Any, name: str) -> PreTrainedModel:
    """Return the model itself, also of a compiled one; ModelError unless it is a whole model of transformers."""
    model = getattr(model, "_orig_mod", model)  # what `torch.compile` returns holds the model and its weights
    if isinstance(model, nn.Module) and any(hasattr(module, "base_layer") for module in model.modules()):
        raise ModelError(
            f"{name}: this model contains a PEFT adapter, which would take part in every measurement; merge it first "
            "(model = model.merge_and_unload()), or remove it (model = model.unload())"
        )
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"{name}: a transformers model is needed, found {type(model).__name__}")
    if not storage.is_loaded(model):
        raise ModelError(f"{name}: some weights are not loaded (meta device); load the model whole")
    return model


@torch.no_grad()
def _verify(editable: Editable) -> None:
    """Check in one forward pass that the model is causal, its numbers finite, and W k + b each layer's output."""
    model, name = editable.model, editable.name
    ids = editable.probe_ids().to(editable.device)
    dense = {ff.memories[0].address: ff.memories[0] for ff in editable.feed_forward if ff.mixture is None}
    modules = {address: memory.module for address, memory in dense.items()}
    blocks = {id(module) for layer in editable.layers for module in layer.modules()}
    outside = {
        path: module
        for path, module in model.named_modules()
        if not list(module.children()) and id(module) not in blocks and module is not editable.unembedding
    }
    returned: list[Any] = []  # what the first layer returns, unchanged
    with (
        ExitStack() as stack,
        capture(modules, inputs=True) as keys,
        capture(modules) as outputs,
        capture({"first": editable.layers[0]}) as first,
        editable.layers[0].register_forward_hook(lambda _, args, output: returned.append(output)),
        capture({"unembedding": editable.unembedding}, inputs=True) as final,
        capture(outside) as beside,
    ):
        mixtures = [_watch(stack, ff, ff.mixture, name) for ff in editable.feed_forward if ff.mixture is not None]
        logits = _first_logits(editable, ids)
    if unused := [address.layer for address in dense if address not in outputs]:
        raise ModelError(
            f"{name}: layer {unused[0]} of {type(model).__name__} does not run on text alone (does it read pictures?); "
            "a decoder in which every layer does was expected"
        )
    # The probe reads every weight but the embeddings of other tokens.
    embedding = storage.fetched(editable.embedding)
    # A sum is faster, and overflows only for huge numbers.
    finite = bool(torch.isfinite(embedding.sum())) or bool(torch.isfinite(embedding).all())
    if not (torch.isfinite(logits).all() and finite):
        names = [path for path, _ in storage.parameters(model)]
        bad = [path for path in names if not torch.isfinite(storage.fetched_from(model, path)).all()]
        where = f"the weight {bad[0]} holds NaN or infinity" if bad else "its weights are finite, so it overflows"
        raise ModelError(
            f"{name}: the model gives numbers that are not finite: {where}; use another checkpoint or dtype"
        )
    shorter = editable.run(input_ids=ids[:, :-1], use_cache=False).logits
    scale = float(logits.abs().max())
    tolerance = (1e-4 if logits.dtype.itemsize >= 4 else 5e-2) * scale
    if float((logits[:, :-1] - shorter).abs().max()) > tolerance:  # small, in a hardly trained encoder
        raise ModelError(
            f"{name}: {type(model).__name__} looks ahead (an encoder, or a prompt that is read as a whole); a causal "
            "decoder is needed"
        )
    editable.layer_outputs = 2 if isinstance(returned[0], tuple) else 0
    state = final["unembedding"]
    # The modules around the layers may be on several devices.
    same_shape = {path: out.to(state.device) for path, out in beside.items() if out.shape == state.shape}
    feeding = [path for path, out in same_shape.items() if torch.equal(out, state)]
    editable.norm = feeding[-1] if feeding else ""
    d_model = first["first"].shape[-1]
    errors = [_product_error(memory, keys[at], outputs[at], d_model, name) for at, memory in dense.items()]
    errors += [check() for check in mixtures]
    editable.probe_error = max(errors)
    editable.resumable = _gap(replay.check, editable, ids) <= tolerance
    if not editable.resumable and not (gap := _gap(replay.check, editable, ids)) <= tolerance:
        raise ModelError(
            f"{name}: {type(model).__name__} cannot continue a recorded pass from a middle layer (logits off by "
            f"{gap:.1e}); a decoder whose layers pass on only a residual stream was expected"
        )
    editable.ragged = editable.resumable and _gap(replay.check_each, editable, ids) <= tolerance
    if editable.ragged and _gap(contexts.check, editable, ids) <= tolerance:
        editable.packed = 1  # no attention window is shorter; longer texts are tried on demand


def _first_logits(editable: Editable, ids: Tensor) -> Tensor:
    """Run the model for the first time; ModelError where its class cannot be run on text alone."""
    try:
        logits: Tensor = editable.run(input_ids=ids, use_cache=False).logits
    except torch.OutOfMemoryError:
        raise
    except RUN_ERRORS as error:
        raise ModelError(
            f"{editable.name}: transformers {transformers.__version__} cannot run {type(editable.model).__name__} on "
            f"text alone ({brief(error)}); a decoder that needs no pictures was expected"
        ) from error
    return logits


def _product_error(memory: KeyValueMemory, key: Tensor, output: Tensor, d_model: int, name: str) -> float:
    """Return the difference of W k + b from the module's output for `key`, relative to the scale of `output`."""
    if memory.shape[0] != d_model:
        raise ModelError(
            f"{name}: {memory.name} gives {memory.shape[0]} features, but d_model is {d_model}; "
            "name the value matrix with --value-matrix"
        )
    blocks = [W] if (W := memory.value).dtype == torch.float32 else W.split(BLOCK)
    expected = torch.cat([key.float() @ block.float().T for block in blocks], -1)
    if memory.bias is not None:
        expected = expected + memory.bias.float()
    return _difference(expected, output, memory.name, name, torch.int8 if memory.quantised else memory.dtype)


def _difference(expected: Tensor, output: Tensor, path: str, name: str, dtype: torch.dtype) -> float:
    observed = output.float().reshape(expected.shape)
    gaps = (expected - observed).abs()
    error = float(gaps.max() / observed.abs().max().clamp(min=1e-12))
    # 16-bit sums may differ by a few units in the last place.
    if not error <= (1e-3 if dtype.itemsize >= 4 else 5e-2):
        product, gave = (float(side.flatten()[gaps.argmax()]) for side in (expected, observed))
        raise ModelError(
            f"{name}: W k + b is {product:.4g}, but {path} gives {gave:.4g} (off by {error:.1e} of its scale), so "
            "it is more than a product; merge its adapter, or name another module with --value-matrix"
        )
    return error


def _watch(stack: ExitStack, layer: FeedForward, mixture: Mixture, name: str) -> Callable[[], float]:
    """Watch a mixture in a pass; the function returns the difference of W k + b from its block's output."""
    shared: dict[int, Tensor] = {}
    routed: list[Routed] = []

    def see(expert: int, rows: Tensor | None, keys: Tensor, tokens: int) -> None:
        shared[expert] = keys.float().clone()

    stack.enter_context(mixture.watched(see, routed.append, only=frozenset(mixture.shared)))
    output = stack.enter_context(capture({0: mixture.block}))

    def check() -> float:
        expected = mixture.attend(routed[-1], shared).float()
        return _difference(expected, output[0], f"the block of experts in layer {layer.layer}", name, layer.dtype)

    return check


def _gap(check: Callable[[Editable, Tensor], float], editable: Editable, ids: Tensor) -> float:
    """Return the result of a check of reruns; infinity if the model cannot be run in this way."""
    try:
        return check(editable, ids)
    except torch.OutOfMemoryError:
        raise
    except RUN_ERRORS:
        return float("inf")
