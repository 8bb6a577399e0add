"""Recognise the parts of a model: its layers, the value matrices in each, the attention's output, the residual add.

The model's type is not used. A module is recognised by its name (`roles`), by its kind (a linear map, a block of
experts) and by the number of such modules; a forward pass verifies that it does what its role says (`loading.verify`).
A module that is not recognised is refused, and the error lists what was found.

Blocks add their feed-forward output to the residual stream differently: some normalise it first (Gemma 2, OLMo 2), or
the sum (GPT-1, OPT-350m), some scale it (Granite), some add the attention's at once (GPT-J, Falcon). So passes show
which modules run after it, and what the residual stream is when the last layer's output is set to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from ffedit.algebra.linalg import double
from ffedit.errors import ModelError
from ffedit.model.experts import Experts, Mixture
from ffedit.model.feed_forward import FeedForward
from ffedit.model.hooks import Call, calls, capture, replace_output
from ffedit.model.memory import Address, KeyValueMemory
from ffedit.model.roles import ATTENTION_ROLES, ATTENTION_WORDS, SHARED_GATES, VALUE_ROLES
from ffedit.model.storage import is_floating, is_quantised


def find_layers(body: nn.Module, name: str, count: int) -> list[nn.Module]:
    """Return the layers of a decoder: its only module list of `count` modules that is inside no other list."""
    nested = {path: child for path, child in body.named_modules() if isinstance(child, nn.ModuleList)}
    lists = {p: child for p, child in nested.items() if not any(p.startswith(f"{other}.") for other in nested)}
    matching = [list(child) for child in lists.values() if len(child) == count]
    if len(matching) != 1:
        listed = ", ".join(f"{path} of {len(child)}" for path, child in lists.items()) or "none"
        raise ModelError(
            f"{name}: no decoder that ffedit can read: one list of {count} layers was expected in "
            f"{type(body).__name__}, but its module lists are: {listed}"
        )
    return matching[0]


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a model, with what is needed to find its memories."""

    model: PreTrainedModel
    module: nn.Module
    index: int
    name: str  # the model's name in messages
    probe: Callable[[], object]  # runs the model once
    # path of the value matrix, where no known role fits (`loading.verify.find_and_verify`)
    value_matrix: str | None = None
    saved_dtype: torch.dtype | None = None  # precision of the checkpoint, where it is not that of the weights in memory

    @cached_property
    def prefix(self) -> str:
        """Path of the layer in the model."""
        return str(next(path for path, module in self.model.named_modules() if module is self.module))


def find_feed_forward(layer: Layer) -> FeedForward:
    """Find the memories of one layer: its value matrix, or those of its experts."""
    name, index = layer.name, layer.index
    fused = {  # parameters that hold a value matrix for each expert, with their shapes
        path: list(p.shape)
        # By name, too: gates of a recurrence and filters may have three dimensions.
        for path, p in layer.module.named_parameters()
        if p.ndim == 3 and min(p.shape) > 1 and any(step in VALUE_ROLES for step in path.split("."))
    }
    if layer.value_matrix is not None or not fused:
        memory = find_memory(layer)
        return FeedForward(index, memory.module, (memory,))
    paths = {path.rpartition(".")[0] for path in fused}
    block_path, _, _ = min(paths).rpartition(".")
    if len(paths) != 1 or not block_path:
        listed = ", ".join(f"{path} {shape}" for path, shape in fused.items())
        raise ModelError(
            f"{name}: layer {index} holds matrices of several experts in one tensor ({listed}); one module of experts, "
            "inside a block with its router, was expected; use a dense model"
        )
    (path,) = paths
    block = layer.module.get_submodule(block_path)
    try:
        experts = Experts(layer.module.get_submodule(path))
    except ModelError as error:
        raise ModelError(f"{name}: layer {index}: {error}") from error
    precision = layer.saved_dtype or next(experts.module.parameters()).dtype
    names = names_of_experts(layer.model, f"{layer.prefix}.{path}.down_proj", len(experts))
    memories = [
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
            saved_as=names[expert],
        )
        for expert in range(len(experts))
    ]
    shared = {}
    for number, inner in enumerate(_in_value_role(block), len(experts)):
        if isinstance(module := block.get_submodule(inner), nn.Linear | Conv1D):
            memories.append(linear_memory(layer, f"{block_path}.{inner}", Address(index, number)))
            shared[number] = module
    gate = next((getattr(block, role) for role in SHARED_GATES if hasattr(block, role)), None)
    return FeedForward(index, block, tuple(memories), Mixture(block, experts, shared, gate))


def find_memory(layer: Layer) -> KeyValueMemory:
    """Find the value matrix of one dense layer: a linear map in a value role, outside attention."""
    name, index, value_matrix = layer.name, layer.index, layer.value_matrix
    paths = _in_value_role(layer.module) if value_matrix is None else _named(layer, value_matrix)
    if len(paths) != 1:
        inside = layer.module.named_modules()
        children = ", ".join(path for path, module in inside if path and not list(module.children()))
        listed = ", ".join(paths) or f"no module is called {value_matrix or '/'.join(VALUE_ROLES)}"
        advice = "name the right one with --value-matrix"
        if not paths and value_matrix is None:
            advice = f"if it has another name, {advice}; a layer without a feed-forward part cannot be edited"
        raise ModelError(
            f"{name}: one value matrix was expected in layer {index}, found {len(paths)} ({listed}); the layer holds "
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
            f"{name}: {path} of layer {index} is a Linear of {weight.dtype}, quantised, but its module cannot "
            "multiply with it; load the model with the library that quantised it, or in 16 or 32 bits"
        )
    computed = layer.model.dtype if quantised or weight is None else weight.dtype
    whole = f"{layer.prefix}.{path}"
    (stored,) = saved(layer.model, f"{whole}.weight", torch.zeros(1, 1))
    return KeyValueMemory(
        address,
        whole,
        module,
        isinstance(module, Conv1D),
        layer.saved_dtype or computed,
        layer.module,
        layer.probe,
        saved_as="" if stored == f"{whole}.weight" else stored,
    )


def _named(layer: Layer, value_matrix: str) -> list[str]:
    """Return the layer's paths that `value_matrix` names: as `ff.out`, or from the model on as `layers.{}.ff.out`."""
    path = value_matrix.replace("{}", str(layer.index))
    whole = value_matrix != path
    return [
        inner
        for inner, _ in layer.module.named_modules()
        if inner == path or (whole and f".{layer.prefix}.{inner}".endswith(f".{path}"))
    ]


def _in_value_role(module: nn.Module) -> list[str]:
    """Return the paths inside a module that end in the name of a value matrix, outside attention."""
    return [
        path
        for path, _ in module.named_modules()
        if f".{path}".endswith(tuple(f".{role}" for role in VALUE_ROLES)) and not _in_attention(path)
    ]


def _in_attention(path: str) -> bool:
    return any(word in path.rpartition(".")[0] for word in ATTENTION_WORDS)


def find_attention(layers: list[nn.Module]) -> list[nn.Module]:
    """Return the output projection of each layer's attention, by its role; empty if one is missing or ambiguous."""
    projections = [
        module
        for layer in layers
        for path, module in layer.named_modules()
        if path.rpartition(".")[2] in ATTENTION_ROLES and _in_attention(path)
    ]
    return projections if len(projections) == len(layers) else []


def saved(model: PreTrainedModel, name: str, parameter: Tensor) -> dict[str, Tensor]:
    """Return a parameter as checkpoint files store it, by name: perhaps under another name, or as several tensors."""
    if getattr(model, "hf_quantizer", None) is not None:  # unpacking of quantised weights has no reverse
        return {name: parameter}
    return dict(revert_weight_conversion(model, {name: parameter}))


def names_of_experts(model: PreTrainedModel, name: str, count: int) -> list[str]:
    """Return the names in files of a parameter's `count` matrices: "" if as in memory, `name[0]` if in one tensor."""
    numbered = torch.arange(float(count))[:, None, None]
    tensors = saved(model, name, numbered)
    (first, tensor), *others = tensors.items()
    if not others and tensor.shape == numbered.shape:
        return ["" if first == name else f"{first}[{expert}]" for expert in range(count)]
    if len(tensors) != count or any(tensor.numel() != 1 for tensor in tensors.values()):
        return [""] * count
    return sorted(tensors, key=lambda path: float(tensors[path]))


@dataclass(frozen=True, eq=False)
class ResidualAdd:
    """Addition of one block's feed-forward output to the residual stream."""

    added: nn.Module  # the module whose output is added: the value matrix or a mixture's block, or a norm behind it
    norm: nn.Module | None  # the module that receives the sum, where the block ends in one
    factor: float = 1.0  # factor of the addend


@torch.no_grad()
def find_residual_adds(
    layers: Sequence[nn.Module], feed_forward: Sequence[FeedForward], probe: Callable[[], object]
) -> list[ResidualAdd]:
    """Find the residual add of every layer, from three passes of `probe`."""
    with ExitStack() as stack:
        seen = [stack.enter_context(block_calls(*pair)) for pair in zip(layers, feed_forward, strict=True)]
        probe()
    residual_adds = [residual_add(ff, steps) for ff, steps in zip(feed_forward, seen, strict=True)]
    factor = _factor(layers[-1], residual_adds[-1], feed_forward[-1].memories[-1].name, probe)
    return [replace(add, factor=factor) for add in residual_adds]


def block_calls(layer: nn.Module, ff: FeedForward) -> AbstractContextManager[list[Call]]:
    """Collect the calls inside a block, for `residual_add`; the feed-forward module counts as one."""
    inside = set(ff.module.modules())
    leaves = [module for module in layer.modules() if not list(module.children())]
    return calls([ff.module, *(module for module in leaves if module not in inside)])


def residual_add(ff: FeedForward, seen: Sequence[Call]) -> ResidualAdd:
    """Follow the feed-forward output through modules that take it alone; a single module after them takes the sum."""
    start = next(i for i, (module, _, _) in enumerate(seen) if module is ff.module)
    added, addend = ff.module, seen[start][2]
    rest = list(seen[start + 1 :])
    while rest and torch.equal(rest[0][1], addend):
        module, _, output = rest.pop(0)
        if not torch.equal(output, addend):  # a dropout changes nothing here
            added, addend = module, output
    return ResidualAdd(added, rest[0][0] if len(rest) == 1 else None)


def _factor(layer: nn.Module, add: ResidualAdd, name: str, probe: Callable[[], object]) -> float:
    """Measure the factor of the addend, by the change of the sum when the addend is removed."""

    def total() -> tuple[Tensor, Tensor]:
        ends = {"total": layer if add.norm is None else add.norm}
        with capture(ends, inputs=add.norm is not None) as sums, capture({"added": add.added}) as addends:
            probe()
        return double(sums["total"]).flatten(), double(addends["added"]).flatten()

    whole, addend = total()
    with replace_output(add.added, torch.zeros_like):
        change = whole - total()[0]
    factor = float(change @ addend / (addend @ addend).clamp(min=1e-30))
    error = float((change - factor * addend).abs().max() / change.abs().max().clamp(min=1e-30))
    if not error < 5e-2:
        raise ModelError(
            f"{name}: its output is not added to the residual stream (off by {error:.1e}); a block that adds its "
            "feed-forward output to the stream was expected"
        )
    return 1.0 if abs(factor - 1) < 1e-2 else factor
