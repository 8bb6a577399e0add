"""A second device made of CPU memory, which refuses what accelerators refuse: tensors of two devices, and float64.

A tensor of it is a subclass of `torch.Tensor` that says its device is `second:0` and holds a plain tensor.
Every operation on it is done on the plain ones, after the checks that a real device makes: no tensor of it becomes
float64, and tensors of two devices do not meet, but for numbers without a dimension and for indices.

Importing this gives torch the device for the rest of the process, so tests do it in a process of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from ffedit.model.editable import Editable

_setup_privateuseone_for_python_backend("second")
SECOND = torch.device("second", 0)
# Operations whose arguments may be on two devices: copies from one to the other, and indices.
COPIES, INDEXED = {"_to_copy", "copy_"}, {"index", "index_put", "index_put_", "_index_put_impl_"}


LIBRARY = torch.library.Library("aten", "IMPL")


def empty(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
    """Return a tensor on the device."""
    return SecondTensor(torch.empty_strided(size, stride, dtype=dtype))


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy a tensor to the device."""
    target.held.copy_(source)  # type: ignore[attr-defined]
    return target


# `torch.tensor` asks for these below every mode of dispatch.
LIBRARY.impl("empty_strided", empty, "PrivateUse1")
LIBRARY.impl("_copy_from", copy_from, "PrivateUse1")


class SecondTensor(Tensor):
    """A tensor on the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> SecondTensor:
        made: SecondTensor = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=SECOND,
            requires_grad=held.requires_grad,
        )
        made.held = held.detach()
        return made

    def tolist(self) -> Any:
        return self.held.tolist()

    def __deepcopy__(self, memo: Any) -> SecondTensor:
        return SecondTensor(self.held.clone())

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SecondTensor({self.held})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return SecondDevice.run(function, args, kwargs or {})


def mapped(act: Callable[[Any], Any], value: Any) -> Any:
    """Apply `act` to each leaf of lists, tuples and dictionaries; torch's own does so at three times the cost."""
    if isinstance(value, list | tuple):
        return type(value)([mapped(act, item) for item in value])
    if isinstance(value, dict):
        return {name: mapped(act, item) for name, item in value.items()}
    return act(value)


class SecondDevice(TorchDispatchMode):
    """The device, for the length of a block."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(function, args, kwargs or {})

    @classmethod
    def run(cls, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation on plain tensors; what it makes is on the device of its arguments, or the one asked for."""
        name = function.overloadpacket.__name__
        tensors: list[Tensor] = []
        mapped(lambda value: tensors.append(value) if isinstance(value, Tensor) else None, (args, kwargs))
        own = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, SecondTensor)}
        others = [tensor for tensor in tensors if not isinstance(tensor, SecondTensor) and tensor.ndim]
        if own and others and name not in COPIES | INDEXED:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two, second:0 and cpu ({name})"
            )
        target = kwargs.get("device")
        here = bool(own) if target is None else torch.device(target).type == SECOND.type
        if name in INDEXED | COPIES - {"_to_copy"}:
            here = isinstance(args[0], SecondTensor)
            if name in INDEXED and not here and own:
                raise RuntimeError("indices should be on the same device as the indexed tensor (cpu)")
        if own and torch.float64 in kwargs.values():
            cls.refuse()  # a copy to the CPU is converted before it is sent
        plain, named = mapped(lambda value: value.held if isinstance(value, SecondTensor) else value, (args, kwargs))
        if target is not None:
            named["device"] = torch.device("cpu")
        if name == "histc":  # of whole numbers, which a GPU counts and a CPU does not
            done = function(plain[0].float(), *plain[1:], **named).to(plain[0].dtype)
        else:
            done = function(*plain, **named)

        def wrapped(value: Any) -> Any:
            if not isinstance(value, Tensor) or id(value) in own:
                return own.get(id(value), value)
            if value.dtype == torch.float64:
                cls.refuse()
            return SecondTensor(value)

        return mapped(wrapped, done) if here else done

    @staticmethod
    def refuse() -> NoReturn:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")


def moved(model: nn.Module) -> nn.Module:
    """Move a model's parameters and buffers to the device, in place; tied ones stay tied."""
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in known:
                known[id(parameter)] = nn.Parameter(SecondTensor(parameter.detach()), parameter.requires_grad)
            module._parameters[name] = known[id(parameter)]
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = SecondTensor(buffer)
    return model


def spread(editable: Editable, on_second: range) -> nn.Module:
    """Move some layers of an untied model to the device, and what is before or behind all layers with its neighbor."""
    depth, model = len(editable.layers), editable.model
    assert editable.embedding.weight is not editable.unembedding.weight
    above = [module for module in model.modules() if not list(module.children())]
    inside = {id(module) for layer in editable.layers for module in layer.modules()}
    before = [module for module in above if id(module) not in inside and module is editable.embedding]
    behind = [module for module in above if id(module) not in inside and module is not editable.embedding]
    layers = [([layer], number) for number, layer in enumerate(editable.layers)]
    groups = [(before, 0), *layers, (behind, depth - 1)]
    for modules, number in groups:
        for module in modules:
            if number in on_second:
                moved(module)
            where = SECOND if number in on_second else torch.device("cpu")
            add_hook_to_module(module, AlignDevicesHook(where))
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True))  # as accelerate's dispatch_model does
    return model
