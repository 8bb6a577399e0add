"""Access to a model's weights, in its modules or offloaded until a module's own forward needs them.

A model that is larger than its accelerator is spread by accelerate (`device_map`): what does not fit stays in CPU
memory or in the checkpoint's files, and the module holds an empty tensor (on the meta device) except while it runs.
Only this module handles it. Reading such a weight fetches what the next forward would use. Writing it puts
the new matrix in CPU memory, from which the next forward fetches it, and no file of the checkpoint is changed.
A quantised weight is read as the numbers that it stands for (`quantized`), and never written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset
from torch import Tensor, nn

from ffedit.errors import ModelError
from ffedit.model import quantized


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module computes; its weights may be elsewhere."""
    devices = (hook.execution_device for hook in _hooks(module) if hook.execution_device is not None)
    device = next(devices, None)
    held = chain(module.parameters(), module.buffers())  # quantised weights may be buffers
    return next(held).device if device is None else torch.device(device)


def solve_device(device: torch.device, numbers: int) -> torch.device:
    """Return the device for float64 work: `device` where it can and has room for so many numbers, else the CPU."""
    cpu = torch.device("cpu")
    if not torch.empty(0, device=device).is_cuda:
        return cpu
    free, _ = torch.cuda.mem_get_info(device)
    return device if free > 8 * numbers else cpu


def fetched(module: nn.Module, name: str = "weight") -> Tensor:
    """Return a parameter as the module's forward would use it: the tensor itself, or a copy where it is offloaded.

    Raises:
        ModelError: it was never loaded.
    """
    if name == "weight" and quantized.is_quantised(module):
        return quantized.asked(module, device_of(module))
    parameter: Tensor = getattr(module, name).detach()
    if not parameter.is_meta:
        return parameter
    hook = _offloading(module)
    if hook is None:
        raise ModelError(f"a {name} of {type(module).__name__} is not loaded (meta device); load the model whole")
    found: Tensor = hook.weights_map[name].detach()
    return found.to(device_of(module), parameter.dtype)


@torch.no_grad()
def write_(module: nn.Module, value: Tensor, name: str = "weight", slot: int | None = None) -> None:
    """Set a parameter to `value`, of its shape, rounded to its dtype; or with `slot`, one entry of it.

    Raises:
        ModelError: it was never loaded.
    """
    parameter: Tensor = getattr(module, name)
    if not parameter.is_meta:
        (parameter if slot is None else parameter[slot]).copy_(value)
        return
    hook = _offloading(module)
    if hook is None:
        raise ModelError(f"a {name} of {type(module).__name__} is not loaded (meta device); load the model whole")
    if slot is not None:
        whole = fetched(module, name).clone()
        whole[slot] = value.to(whole)
        value = whole
    weights, key = hook.weights_map, name
    while isinstance(weights, PrefixedDataset):
        weights, key = weights.dataset, weights.prefix + key
    # Weights in memory take precedence over those in files.
    memory = weights.state_dict if isinstance(weights, OffloadedWeightsLoader) else weights
    memory[key] = torch.empty_like(parameter, device="cpu").copy_(value)


@contextmanager
def resident(module: nn.Module) -> Iterator[None]:
    """Load a module's own parameters into it for the length of a block, so that gradients reach them.

    Writes to an offloaded parameter inside the block are lost afterwards.
    """
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
    """Yield every parameter of a model once, by name, as it is held: empty where it is offloaded.

    Tied weights are one parameter; offloading makes two empty ones of them, identified by their declared names.
    Buffers of quantised modules count, too.
    """
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    seen: set[str] = set()
    for name, parameter in model.named_parameters():
        origin = tied.get(name, name)
        if not (parameter.is_meta and origin in seen):
            yield name, parameter
        seen.add(origin)
    for path, module in model.named_modules():
        if quantized.is_quantised(module):
            yield from module.named_buffers(path, recurse=False)


def packed_in(module: nn.Module) -> list[Tensor]:
    """Return all tensors that a quantised module holds but its bias."""
    named = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    return [tensor for name, tensor in named if name != "bias"]


def fetched_from(model: nn.Module, name: str) -> Tensor:
    """Return the parameter of a model called `name`, as `fetched`; a quantised one as it is packed."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    if own == "weight" and quantized.is_quantised(module):
        return quantized.packed(module.weight)  # type: ignore[arg-type]
    return fetched(module, own)


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
    return [one for one in hooks if isinstance(one, AlignDevicesHook)]


def _offloading(module: nn.Module) -> AlignDevicesHook | None:
    """Return the hook that fetches a module's own weights before its forward and drops them after it."""
    return next((hook for hook in _hooks(module) if hook.offload and hook.weights_map is not None), None)
