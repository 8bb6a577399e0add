"""Access to a model's weights: in its modules, offloaded until a module's own forward needs them, or quantised.

A model that is larger than its accelerator is spread by accelerate (`device_map`): what does not fit stays in CPU
memory or in the checkpoint's files, and the module holds an empty tensor (on the meta device) except while it runs.
Reading such a weight fetches what the next forward would use; writing it puts the new matrix in CPU memory, from which
the next forward fetches it. No file of the checkpoint is changed.

A quantised W is packed, each kind by a library of its own, but all can multiply. So W is read by multiplication: the
output for the i-th unit vector is column i of W. It is never written: 16 or 256 levels would lose an edit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard

import psutil
import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ffedit.errors import ModelError

COLUMNS = 1024  # columns of a quantised W that are read at once
# Files with a container's limit of memory: of cgroups 2 and 1.
CONTAINER_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module computes; its weights may be elsewhere."""
    devices = (hook.execution_device for hook in _hooks(module) if hook.execution_device is not None)
    device = next(devices, None)
    tensors = chain(module.parameters(), module.buffers())  # quantised weights may be buffers
    return next(tensors).device if device is None else torch.device(device)


def solve_device(device: torch.device, numbers: int) -> torch.device:
    """Return the device for float64 work: `device` if it is CUDA and has room for so many `numbers`, else the CPU."""
    free = free_memory(device)
    return device if free is not None and free > 8 * numbers else torch.device("cpu")


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a CUDA device, with those that torch keeps for reuse; None for other devices."""
    if not torch.empty(0, device=device).is_cuda:
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def host_memory() -> int:
    """Return the bytes of CPU memory, with swap, that this process can still take within its container's limit."""
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    for file in CONTAINER_LIMITS:
        try:
            limit = int(Path(file).read_text(encoding="ascii"))
        except (OSError, ValueError):  # no container, or one without a limit ("max")
            continue
        free = min(free, max(0, limit - psutil.Process().memory_info().rss))
    return int(free)


def fetched(module: nn.Module, name: str = "weight") -> Tensor:
    """Return a parameter as the next forward would use it: the tensor itself, or a copy where it is offloaded."""
    if name == "weight" and is_quantised(module):
        return unpacked(module, device_of(module))
    parameter: Tensor = getattr(module, name).detach()
    if not parameter.is_meta:
        return parameter
    stored: Tensor = _offloaded_weights(module, name)[name].detach()
    return stored.to(device_of(module), parameter.dtype)


@torch.no_grad()
def write_(module: nn.Module, value: Tensor, name: str = "weight", slot: int | None = None) -> None:
    """Set a parameter, or its entry `slot` alone, to `value` of the same shape, rounded to the parameter's dtype."""
    parameter: Tensor = getattr(module, name)
    if not parameter.is_meta:
        (parameter if slot is None else parameter[slot]).copy_(value)
        return
    weights, key = _offloaded_weights(module, name), name
    if slot is not None:
        whole = fetched(module, name).clone()
        whole[slot] = value.to(whole)
        value = whole
    while isinstance(weights, PrefixedDataset):
        weights, key = weights.dataset, weights.prefix + key
    # Weights in memory take precedence over those in files.
    memory = weights.state_dict if isinstance(weights, OffloadedWeightsLoader) else weights
    memory[key] = torch.empty_like(parameter, device="cpu").copy_(value)


@contextmanager
def resident(module: nn.Module) -> Iterator[None]:
    """Load a module's offloaded parameters for the block, so that gradients reach them; changes to them are lost."""
    hook = _offloading(module)
    if hook is None:
        yield
        return
    empty = dict(module.named_parameters(recurse=False))
    for name in empty:
        setattr(module, name, nn.Parameter(fetched(module, name).clone(), requires_grad=False))
    hook.offload = False
    try:
        yield
    finally:
        hook.offload = True
        for name, parameter in empty.items():
            setattr(module, name, parameter)


def parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of a model once, by name, empty where it is offloaded, and buffers of quantised modules."""
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    seen: set[str] = set()  # offloading makes two empty parameters of tied ones
    for name, parameter in model.named_parameters():
        origin = tied.get(name, name)
        if not (parameter.is_meta and origin in seen):
            yield name, parameter
        seen.add(origin)
    for path, module in model.named_modules():
        if is_quantised(module):
            yield from module.named_buffers(path, recurse=False)


def fetched_from(model: nn.Module, name: str) -> Tensor:
    """Return the parameter `name` of a model as `fetched` does, but a quantised weight as it is packed."""
    path, _, parameter = name.rpartition(".")
    module = model.get_submodule(path)
    if parameter == "weight" and is_quantised(module):
        return packed(module.weight)  # type: ignore[arg-type]
    return fetched(module, parameter)


def is_offloaded(model: nn.Module) -> bool:
    """Return True if some of a model's weights are offloaded."""
    return any(_offloading(module) is not None for module in model.modules())


def is_loaded(model: nn.Module) -> bool:
    """Return True if every weight is loaded, in its module or offloaded."""
    return all(
        _offloading(module) is not None or not any(p.is_meta for p in module.parameters(recurse=False))
        for module in model.modules()
    )


def _hooks(module: nn.Module) -> list[AlignDevicesHook]:
    """Return accelerate's hooks around a module's forward."""
    hook = getattr(module, "_hf_hook", None)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else [hook]
    return [hook for hook in hooks if isinstance(hook, AlignDevicesHook)]


def _offloading(module: nn.Module) -> AlignDevicesHook | None:
    """Return the hook that fetches a module's own weights before its forward and drops them after it."""
    return next((hook for hook in _hooks(module) if hook.offload and hook.weights_map is not None), None)


def _offloaded_weights(module: nn.Module, name: str) -> Any:
    """Return the mapping from which a module's own weights are fetched; ModelError if they were never loaded."""
    hook = _offloading(module)
    if hook is None:
        raise ModelError(f"a {name} of {type(module).__name__} is not loaded (meta device); load the model whole")
    return hook.weights_map


def is_floating(weight: object) -> TypeGuard[Tensor]:
    """Return True if a weight is, or passes for, a tensor of floating-point numbers of 16 bits or more."""
    return isinstance(weight, Tensor) and weight.is_floating_point() and weight.element_size() > 1


def is_quantised(module: nn.Module) -> bool:
    """Return True if a module multiplies by a matrix that it does not hold as plain numbers."""
    sizes = (getattr(module, name, None) for name in ("in_features", "out_features"))
    weight = getattr(module, "weight", None)
    plain = is_floating(weight) and not is_traceable_wrapper_subclass(weight)  # no wrapper of packed numbers
    return all(isinstance(size, int) for size in sizes) and not plain


@torch.no_grad()
def unpacked(module: nn.Module, device: torch.device) -> Tensor:
    """Return W [out_features, in_features] of a quantised module that computes on `device`."""
    linear: Any = module
    bias, size, dtype = linear.bias, linear.in_features, _input_dtype(module)
    linear.bias = None  # W e_i + b − b would be rounded twice
    try:
        # `forward` instead of a call: hooks are only for what passes through the model.
        columns = [linear.forward(one_hot(rows, size).to(device, dtype)) for rows in torch.arange(size).split(COLUMNS)]
    finally:
        linear.bias = bias
    return torch.cat(columns).T


def gives_gradient(module: nn.Module, device: torch.device) -> bool:
    """Return True if gradients pass a quantised module; some kernels are for inference only."""
    linear: Any = module
    with torch.enable_grad():
        x = torch.zeros(1, linear.in_features, device=device, dtype=_input_dtype(module), requires_grad=True)
        try:
            return bool(linear.forward(x).requires_grad)
        except RuntimeError:  # a kernel that overwrites what the gradient needs
            return False


def _input_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype for a quantised module's inputs: its weight's if floating-point, else float32."""
    weight = getattr(module, "weight", None)
    return weight.dtype if is_floating(weight) else torch.float32


def packed(weight: Tensor) -> Tensor:
    """Return a weight as a plain tensor: itself, or the bytes of the tensors that it wraps."""
    if not is_traceable_wrapper_subclass(weight):
        return weight.detach()
    names, _ = weight.__tensor_flatten__()
    inner = (packed(getattr(weight, name)) for name in names)
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in inner])
