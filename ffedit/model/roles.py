"""Recognise the parts of a model by their roles: its layers, the value matrices in each, and the attention's output.

The model's type is not used. A module is recognised by its name (the roles below, which are data), by its kind (a
linear map, a block of experts) and by the number of such modules; a forward pass verifies that it does what its role
says (`loading.verify`). A module that is not recognised is refused, and the error lists what was found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ffedit.errors import ModelError
from ffedit.model.experts import Experts, Mixture
from ffedit.model.feed_forward import FeedForward
from ffedit.model.memory import Address, KeyValueMemory
from ffedit.model.quantized import is_floating, is_quantised
from ffedit.model.saved_names import experts_apart

# Names of the value matrix of a feed-forward layer, by role and not by model.
VALUE_ROLES = (
    *("down_proj", "c_proj", "dense_4h_to_h", "fc2", "fc_out", "w2", "wo", "output_linear"),
    *("output.dense", "lin2", "Wo"),  # encoders
)
# Names of the module that gives the logit of the shared experts' weight, by role.
SHARED_GATES = ("shared_expert_gate",)
ATTENTION_WORDS = ("attn", "attention")
# Names of the last linear map inside attention: its output is the attention's, whatever the block does with it.
ATTENTION_ROLES = ("o_proj", "out_proj", "c_proj", "dense", "wo")


def find_layers(model: PreTrainedModel, name: str) -> list[nn.Module]:
    """Return the decoder's one list of `num_hidden_layers` modules.

    Raises:
        ModelError: there is none, or more than one.
    """
    decoder = model.get_decoder()
    count = model.config.get_text_config().num_hidden_layers
    nested = {path: child for path, child in decoder.named_modules() if isinstance(child, nn.ModuleList)}
    lists = {p: child for p, child in nested.items() if not any(p.startswith(f"{other}.") for other in nested)}
    found = [list(child) for child in lists.values() if len(child) == count]
    if len(found) != 1:
        seen = ", ".join(f"{path} of {len(child)}" for path, child in lists.items()) or "none"
        raise ModelError(
            f"{name}: no causal decoder that ffedit can read: one list of {count} layers was expected in "
            f"{type(decoder).__name__}, found module lists: {seen}"
        )
    return found[0]


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a model, with what is needed to find its memories.

    Attributes:
        model: the model.
        module: the layer.
        index: its number.
        name: the model's name in messages.
        probe: runs the model once.
        value_matrix: path of the value matrix, where no known role fits (`loading.verify.find_and_verify`).
        saved_dtype: precision of the checkpoint, where it is not that of the weights in memory.
    """

    model: PreTrainedModel
    module: nn.Module
    index: int
    name: str
    probe: Callable[[], object]
    value_matrix: str | None = None
    saved_dtype: torch.dtype | None = None

    @cached_property
    def prefix(self) -> str:
        """Path of the layer in the model."""
        found: str = next(path for path, module in self.model.named_modules() if module is self.module)
        return found


def find_feed_forward(layer: Layer) -> FeedForward:
    """Find the memories of one layer: its value matrix, or those of its experts."""
    name, index = layer.name, layer.index
    found = {} if layer.value_matrix is not None else fused_experts(layer.module)
    if not found:
        memory = find_memory(layer)
        return FeedForward(index, memory.module, (memory,))
    paths = {path.rpartition(".")[0] for path in found}
    block_path, _, _ = min(paths).rpartition(".")
    if len(paths) != 1 or not block_path:
        seen = ", ".join(f"{path} {shape}" for path, shape in found.items())
        raise ModelError(
            f"{name}: layer {index} holds matrices of several experts in one tensor ({seen}); one module of experts, "
            "inside a block with its router, was expected; use a dense model"
        )
    (path,) = paths
    block = layer.module.get_submodule(block_path)
    try:
        experts = Experts(layer.module.get_submodule(path))
    except ModelError as error:
        raise ModelError(f"{name}: layer {index}: {error}") from error
    precision = layer.saved_dtype or next(experts.module.parameters()).dtype
    apart = experts_apart(layer.model, f"{layer.prefix}.{path}.down_proj", len(experts))
    parts = [
        KeyValueMemory(
            Address(index, expert),
            f"{layer.prefix}.{path}",
            experts.module,
            experts.layout.transposed,
            precision,
            layer.module,
            layer.probe,
            own="down_proj",
            slot=expert,
            saved_as=apart[expert] if apart else "",
        )
        for expert in range(len(experts))
    ]
    shared = {
        len(experts) + i: f"{block_path}.{inner}"
        for i, inner in enumerate(_in_value_role(block))
        if isinstance(block.get_submodule(inner), nn.Linear | Conv1D)
    }
    parts += [linear_memory(layer, inner, Address(index, number)) for number, inner in shared.items()]
    modules = {number: layer.module.get_submodule(inner) for number, inner in shared.items()}
    gate = next((getattr(block, role) for role in SHARED_GATES if hasattr(block, role)), None)
    return FeedForward(index, block, tuple(parts), Mixture(block, experts, modules, gate))


def find_memory(layer: Layer) -> KeyValueMemory:
    """Find the value matrix of one dense layer: a linear map in a value role, outside attention."""
    name, index, value_matrix = layer.name, layer.index, layer.value_matrix
    inside = dict(layer.module.named_modules())
    paths = _in_value_role(layer.module) if value_matrix is None else _named(layer, value_matrix)
    if len(paths) != 1:
        children = ", ".join(path for path, module in inside.items() if path and not list(module.children()))
        found = ", ".join(paths) or f"no module is called {value_matrix or '/'.join(VALUE_ROLES)}"
        advice = "name the right one with --value-matrix"
        if not paths and value_matrix is None:
            advice = f"where it is called otherwise, {advice}; a layer without a feed-forward part has none to edit"
        raise ModelError(
            f"{name}: one value matrix was expected in layer {index}, found {len(paths)} ({found}); the layer holds "
            f"{children}; {advice}"
        )
    return linear_memory(layer, paths[0], Address(index))


def linear_memory(layer: Layer, path: str, address: Address) -> KeyValueMemory:
    """Return the memory whose value matrix is the linear map at `path` in a layer."""
    module, name, index = layer.module.get_submodule(path), layer.name, layer.index
    weight = getattr(module, "weight", None)
    quantised = is_quantised(module)
    if not quantised and not (isinstance(weight, Tensor) and isinstance(module, nn.Linear | Conv1D)):
        raise ModelError(f"{name}: {path} of layer {index} is a {type(module).__name__}; Linear or Conv1D was expected")
    if type(module) is nn.Linear and isinstance(weight, Tensor) and not is_floating(weight):
        raise ModelError(
            f"{name}: {path} of layer {index} is a Linear of {weight.dtype}, quantised without the module that "
            "multiplies with it; load the model with the library that quantised it, or in 16 or 32 bits"
        )
    transposed = isinstance(module, Conv1D)
    computed = layer.model.dtype if quantised or weight is None else weight.dtype
    precision = layer.saved_dtype or computed
    return KeyValueMemory(address, f"{layer.prefix}.{path}", module, transposed, precision, layer.module, layer.probe)


def _named(layer: Layer, value_matrix: str) -> list[str]:
    """Return the paths inside a layer that match `ff.out`, or `layers.{}.ff.out` in the model or a part of it."""
    path = value_matrix.replace("{}", str(layer.index))
    whole = value_matrix != path
    return [
        inner
        for inner, _ in layer.module.named_modules()
        if inner == path or (whole and f".{layer.prefix}.{inner}".endswith(f".{path}"))
    ]


def _in_value_role(module: nn.Module) -> list[str]:
    """Return the paths inside a module that are named as value matrices are, outside attention."""
    return [
        path
        for path, _ in module.named_modules()
        if f".{path}".endswith(tuple(f".{role}" for role in VALUE_ROLES))
        and not any(word in part for part in path.split(".")[:-1] for word in ATTENTION_WORDS)
    ]


def fused_experts(layer: nn.Module) -> dict[str, list[int]]:
    """Return the parameters of a layer that hold a value matrix for each expert, with their shapes.

    Other parameters of three dimensions (gates of a recurrence, filters) have no such name.
    """
    return {
        path: list(p.shape)
        for path, p in layer.named_parameters()
        if p.ndim == 3 and min(p.shape) > 1 and any(part in VALUE_ROLES for part in path.split("."))
    }


def find_attention(layers: list[nn.Module]) -> list[nn.Module]:
    """Return the output projections: in each layer the one linear map in such a role, inside attention."""
    found = []
    for layer in layers:
        for path, module in layer.named_modules():
            *above, last = path.split(".")
            if last in ATTENTION_ROLES and any(word in part for part in above for word in ATTENTION_WORDS):
                found.append(module)
    return found if len(found) == len(layers) else []
