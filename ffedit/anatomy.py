"""Find a model's feed-forward memories: ask, recognise, verify.

*Ask* transformers for the decoder and the unembedding; *recognise* the layers (the decoder's one list of
`num_hidden_layers` modules) and in each the value matrix by its role in the feed-forward block; *verify* with one
forward pass that the parts found satisfy W k + b = observed output, and that running on from the middle of a
recorded pass gives the logits of the whole. What is not recognised is refused with what was seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from ffedit import placement, replay
from ffedit.errors import ModelError
from ffedit.history import History
from ffedit.hooks import captured, returned
from ffedit.memory import Address, KeyValueMemory, Memories

# What the value matrix of a feed-forward layer is called, by role and not by model.
VALUE_ROLES = (
    *("down_proj", "c_proj", "dense_4h_to_h", "fc2", "fc_out", "w2", "wo", "output_linear"),
    *("output.dense", "lin2", "Wo"),  # encoders
)
ATTENTION_WORDS = ("attn", "attention")
# The last linear map inside attention: what it gives is the attention's output, whatever the block does with it.
ATTENTION_ROLES = ("o_proj", "out_proj", "c_proj", "dense", "wo")


@dataclass(eq=False)
class Editable:
    """A causal language model whose memories have been found and verified.

    Attributes:
        model: the transformers model.
        tokenizer: its tokenizer.
        name: a hub id, a folder, or what it was called by.
        layers: the decoder's blocks, in order.
        memories: the value matrices, by `Address` or layer number.
        attention: the output projection of each layer's attention; empty where it is not recognised.
        embedding: the module that turns ids into vectors.
        unembedding: the module that turns states into logits.
        norm: path of the module that feeds the unembedding.
        layers_return_tuples: whether a block returns a tuple that begins with the hidden state.
        resumable: whether the model can be rerun from a position with a cache; if not, whole rows are rerun.
        ragged: whether each row of a batch can be rerun from a position of its own.
        probe_error: max |W k + b - observed output| over all layers, relative to the outputs' scale.
        history: the edits that are in the weights, and the originals of what they changed.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    layers: list[nn.Module]
    memories: Memories
    attention: list[nn.Module]
    embedding: nn.Module
    unembedding: nn.Module
    norm: str = ""
    layers_return_tuples: bool = False
    resumable: bool = True
    ragged: bool = False
    probe_error: float = 0.0
    history: History = field(default_factory=History)

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return placement.device_of(self.embedding)

    @property
    def last_feed_forward(self) -> nn.Module | None:
        """The module of the last feed-forward layer, norms outside; None where it is no module of its own (OPT)."""
        path = max(self.memories.values(), key=lambda memory: memory.address).name.rsplit(".", 1)[0]
        module = self.model.get_submodule(path)
        return None if module is self.layers[-1] else module

    def outputs_of(self, part: str) -> list[nn.Module]:
        """The modules whose output is that of the "feed_forward" or "attention" part, layer by layer.

        Raises:
            ModelError: the attention's output projections were not recognised.
        """
        if part == "attention":
            if not self.attention:
                raise ModelError(
                    f"{self.name}: the attention's output projection was not recognised (one module called "
                    f"{'/'.join(ATTENTION_ROLES)} in each layer was expected); trace states or feed-forward outputs"
                )
            return self.attention
        return [self.memories[layer].module for layer in range(len(self.layers))]

    @property
    def max_tokens(self) -> int:
        """Longest input that the model takes."""
        config: Any = self.model.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or 2048)


def dissect(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    name: str = "model",
    value_matrix: str | None = None,
    saved_dtype: torch.dtype | None = None,
) -> Editable:
    """Find and verify the parts of `model` that ffedit works with.

    Args:
        model: a causal decoder of transformers, in evaluation mode.
        tokenizer: its tokenizer.
        name: how messages call it.
        value_matrix: path of the value matrix inside a layer (`ff.out`), where no known role fits.
        saved_dtype: precision of the checkpoint, where it is not that of the weights in memory.

    Raises:
        ModelError: the model is no causal decoder, is quantised, holds NaN, or a part cannot be recognised or verified.
    """
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"{name}: a transformers model is needed, found {type(model).__name__}")
    unembedding = model.get_output_embeddings()
    if model.config.is_encoder_decoder or unembedding is None:
        raise ModelError(f"{name}: {type(model).__name__} is not a causal decoder (no unembedding, or an encoder)")
    if not placement.is_loaded(model):
        raise ModelError(f"{name}: some weights are not loaded (meta device); load the model whole")
    layers = _find_layers(model, name)

    def probe() -> None:
        model(input_ids=probe_ids(editable).to(editable.device), use_cache=False)

    found = [find_memory(model, layer, i, name, probe, value_matrix, saved_dtype) for i, layer in enumerate(layers)]
    memories = Memories(found)
    embedding = model.get_input_embeddings()
    attention = _find_attention(layers)
    editable = Editable(model, tokenizer, name, layers, memories, attention, embedding, unembedding)
    _verify(editable)
    return editable


def _find_layers(model: PreTrainedModel, name: str) -> list[nn.Module]:
    decoder = model.get_decoder()
    count = model.config.get_text_config().num_hidden_layers
    lists = {path: child for path, child in decoder.named_children() if isinstance(child, nn.ModuleList)}
    found = [list(child) for child in lists.values() if len(child) == count]
    if len(found) != 1:
        seen = ", ".join(f"{path} of {len(child)}" for path, child in lists.items()) or "none"
        raise ModelError(
            f"{name}: no causal decoder that ffedit can read: one list of {count} layers was expected in "
            f"{type(decoder).__name__}, found module lists: {seen}"
        )
    return found[0]


def find_memory(
    model: PreTrainedModel,
    layer: nn.Module,
    index: int,
    name: str,
    probe: Callable[[], object],
    value_matrix: str | None = None,
    saved_dtype: torch.dtype | None = None,
) -> KeyValueMemory:
    """The value matrix of one layer: a linear map in a value role, outside attention."""
    inside = dict(layer.named_modules())
    if value_matrix is not None:
        paths = [value_matrix] if value_matrix in inside else []
    else:
        paths = [
            path
            for path in inside
            if f".{path}".endswith(tuple(f".{role}" for role in VALUE_ROLES))
            and not any(word in part for part in path.split(".")[:-1] for word in ATTENTION_WORDS)
        ]
    fused = _fused_experts(layer)
    if fused and not paths and (value_matrix is None or value_matrix in fused):
        seen = ", ".join(f"{path} {shape}" for path, shape in fused.items())
        raise ModelError(
            f"{name}: layer {index} is a mixture of experts in fused tensors ({seen}), which this version of ffedit "
            "cannot edit; --value-matrix names linear maps only; use a dense model, or one with a shared expert in "
            "every layer"
        )
    if len(paths) != 1:
        children = ", ".join(path for path, module in inside.items() if path and not list(module.children()))
        raise ModelError(
            f"{name}: one value matrix was expected in layer {index}, found {len(paths)} "
            f"({', '.join(paths) or 'no module is called ' + '/'.join(VALUE_ROLES)}); the layer holds {children}; "
            "name the right one with --value-matrix"
        )
    path, module = paths[0], inside[paths[0]]
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or not isinstance(module, nn.Linear | Conv1D):
        raise ModelError(f"{name}: {path} of layer {index} is a {type(module).__name__}; Linear or Conv1D was expected")
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise ModelError(
            f"{name}: {path} of layer {index} is quantised ({weight.dtype}); edit the model in 16 or 32 bits and "
            "quantise the result"
        )
    prefix = next(p for p, m in model.named_modules() if m is layer)
    transposed = isinstance(module, Conv1D)
    precision = saved_dtype or weight.dtype
    return KeyValueMemory(Address(index), f"{prefix}.{path}", module, transposed, precision, layer, probe)


def _fused_experts(layer: nn.Module) -> dict[str, list[int]]:
    """The parameters of a layer that hold a matrix for each expert, with their shapes."""
    return {path: list(p.shape) for path, p in layer.named_parameters() if p.ndim == 3 and min(p.shape) > 1}


def _find_attention(layers: list[nn.Module]) -> list[nn.Module]:
    """The output projections: in each layer the one linear map in such a role, inside attention."""
    found = []
    for layer in layers:
        for path, module in layer.named_modules():
            *above, last = path.split(".")
            if last in ATTENTION_ROLES and any(word in part for part in above for word in ATTENTION_WORDS):
                found.append(module)
    return found if len(found) == len(layers) else []


def probe_ids(editable: Editable, count: int = 8) -> Tensor:
    """A few fixed token ids [1, count] that any vocabulary has."""
    size = int(editable.model.config.get_text_config().vocab_size)
    return (torch.arange(count) * 7919 + 11)[None, :] % size


@torch.no_grad()
def _verify(editable: Editable) -> None:
    """One forward pass: is the model causal, are its numbers finite, is W k + b what each layer gives?"""
    model, name = editable.model, editable.name
    ids = probe_ids(editable).to(editable.device)
    modules = {memory.address: memory.module for memory in editable.memories.values()}
    blocks = {id(module) for layer in editable.layers for module in layer.modules()}
    outside = {
        path: module
        for path, module in model.named_modules()
        if not list(module.children()) and id(module) not in blocks and module is not editable.unembedding
    }
    with (
        captured(modules, inputs=True) as keys,
        captured(modules) as outputs,
        captured({"first": editable.layers[0]}) as first,
        returned(editable.layers[0]) as things,
        captured({"unembedding": editable.unembedding}, inputs=True) as final,
        captured(outside) as beside,
    ):
        logits = model(input_ids=ids, use_cache=False).logits
    # The probe reads every weight but the embeddings of other tokens.
    if not (torch.isfinite(logits).all() and torch.isfinite(placement.fetched(editable.embedding)).all()):
        names = [path for path, _ in placement.parameters(model)]
        bad = [path for path in names if not torch.isfinite(placement.fetched_from(model, path)).all()]
        where = f"the weight {bad[0]} holds NaN or infinity" if bad else "its weights are finite, so it overflows"
        raise ModelError(f"{name}: the model's numbers are not finite; {where}; a sound checkpoint was expected")
    shorter = model(input_ids=ids[:, :-1], use_cache=False).logits
    scale = float(logits.abs().max())
    if float((logits[:, :-1] - shorter).abs().max()) > 0.05 * scale:
        raise ModelError(f"{name}: {type(model).__name__} looks ahead (an encoder?); a causal decoder is needed")
    editable.layers_return_tuples = isinstance(things[0], tuple)
    state = final["unembedding"]
    feeding = [path for path, out in beside.items() if out.shape == state.shape and torch.equal(out, state)]
    editable.norm = feeding[-1] if feeding else ""
    d_model = first["first"].shape[-1]
    for address, memory in editable.memories.items():
        error = product_error(memory, keys[address], outputs[address], d_model, name)
        editable.probe_error = max(editable.probe_error, error)
    near = (1e-4 if logits.dtype == torch.float32 else 5e-2) * scale
    editable.resumable = _gap(replay.check, editable, ids) <= near
    editable.ragged = editable.resumable and _gap(replay.check_each, editable, ids) <= near


def product_error(memory: KeyValueMemory, key: Tensor, output: Tensor, d_model: int, name: str) -> float:
    """How far W k + b is from what the module gave for `key`, relative to the scale of `output`.

    Raises:
        ModelError: too far, or the module does not give d_model features.
    """
    if memory.shape[0] != d_model:
        raise ModelError(
            f"{name}: {memory.name} gives {memory.shape[0]} features, {d_model} (d_model) were expected; "
            "name the value matrix with --value-matrix"
        )
    expected = key.float() @ memory.value.float().T
    if memory.bias is not None:
        expected = expected + memory.bias.float()
    observed = output.float()
    error = float((expected - observed).abs().max() / observed.abs().max().clamp(min=1e-12))
    # 16-bit sums may differ by a few units in the last place.
    if error > (1e-3 if memory.weight.dtype == torch.float32 else 5e-2):
        raise ModelError(
            f"{name}: W k + b differs from what {memory.name} gives by {error:.1e} of its scale; the module does "
            "more than multiply (an adapter?): merge it, or name another with --value-matrix"
        )
    return error


def _gap(check: Callable[[Editable, Tensor], float], editable: Editable, ids: Tensor) -> float:
    """What a check of `replay` finds; infinite where the model cannot be run in this way."""
    try:
        return check(editable, ids)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return float("inf")
