"""Context managers that read or change the inputs and outputs of modules.

A layer may return a tensor, or a tuple that begins with it; only this module handles that, all others see the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Name = TypeVar("Name")
# A call of a module: what it received and what it returned.
Call = tuple[nn.Module, Tensor, Tensor]


def tensor_of(output: Any) -> Tensor:
    """Return the hidden state in a module's output, [batch, tokens, d]."""
    tensor = output[0] if isinstance(output, tuple) else output
    if not isinstance(tensor, Tensor):
        raise TypeError(f"a tensor, or a tuple that begins with one, was expected; found {type(tensor).__name__}")
    return tensor


def first_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a module's first argument."""
    return args[0] if args else next(iter(kwargs.values()))


@contextmanager
def capture(
    modules: Mapping[Name, nn.Module], inputs: bool = False, first: bool = False
) -> Iterator[dict[Name, Tensor]]:
    """Collect a copy of what `modules` receive (`inputs`) or return, by name; the last call wins.

    With `first`, inputs are captured before other hooks change them. Copies are needed since some blocks (Falcon's
    parallel ones) add to a module's output in place.
    """
    seen: dict[Name, Tensor] = {}

    def before(name: Name, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[name] = first_of(args, kwargs).clone()

    def after(name: Name, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen[name] = tensor_of(output).clone()

    with ExitStack() as stack:
        for name, module in modules.items():
            if inputs:
                hook = module.register_forward_pre_hook(partial(before, name), prepend=first, with_kwargs=True)
            else:
                hook = module.register_forward_hook(partial(after, name))
            stack.enter_context(hook)
        yield seen


@contextmanager
def calls(modules: Iterable[nn.Module]) -> Iterator[list[Call]]:
    """Collect the module, input and output of each call from a tensor to a tensor (or a tuple that begins with one)."""
    seen: list[Call] = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        received = first_of(args, kwargs) if args or kwargs else None
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(received, Tensor) and isinstance(tensor, Tensor):
            seen.append((module, received.clone(), tensor.clone()))

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        yield seen


@contextmanager
def watched(module: nn.Module, see: Callable[[Tensor], None]) -> Iterator[None]:
    """Pass each output of `module` to `see`."""
    with module.register_forward_hook(lambda _, args, output: see(tensor_of(output))):
        yield


@contextmanager
def replace_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Make `module` return `change(tensor)` instead of `tensor`."""

    def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        changed = change(tensor_of(output))
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    with module.register_forward_hook(hook):
        yield


@contextmanager
def replace_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Make `module` receive `change(tensor)` instead of `tensor` as its first argument."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: change(kwargs[name])}

    with module.register_forward_pre_hook(hook, with_kwargs=True):
        yield


def add_at(module: nn.Module, positions: Tensor, added: Tensor) -> AbstractContextManager[None]:
    """Add `added`, [d] or [batch, d], to the output of `module` at one position of each row, [batch]."""
    rows = torch.arange(len(positions))

    def add(output: Tensor) -> Tensor:
        moved = output.reshape(len(positions), -1, output.shape[-1]).clone()  # some modules flatten the batch
        moved[rows, positions] += added.to(moved)
        return moved.reshape(output.shape)

    return replace_output(module, add)


def only_at(module: nn.Module, rows: Tensor, positions: Tensor) -> AbstractContextManager[None]:
    """Run `module`, which acts on each position separately, at the pairs (row, position) only; return 0 elsewhere.

    A module that takes more than one tensor, or returns more, runs as usual.
    """
    rows, positions = torch.stack([rows, positions], 1).unique(dim=0).unbind(1)
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and args[0].dim() == 3:
            computed = original(args[0][rows, positions][None])
            if isinstance(computed, Tensor):
                output = computed.new_zeros(*args[0].shape[:-1], computed.shape[-1])
                output[rows, positions] = computed[0]
                return output
        return original(*args, **kwargs)

    return replace_forward(module, forward)


@contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Make `module` compute `forward`."""
    # An instance attribute shadows the method, and may itself be shadowed already (accelerate's offloading does so).
    original = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if original is None:
            del module.forward
        else:
            module.forward = original


@contextmanager
def other_weight(module: nn.Module, name: str, weight: nn.Parameter, rows: Tensor) -> Iterator[None]:
    """Make `module` use `weight` for the rows in the mask `rows` [n] of its input, [n, 1, d], [n, d] or [1, n, d]."""

    def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        inputs, changed = args[0].reshape(len(rows), -1), output.reshape(len(rows), -1).clone()
        original = getattr(module, name)
        setattr(module, name, weight)
        try:
            changed[rows] = module.forward(inputs[rows])  # not the module, whose hooks have run
        finally:
            setattr(module, name, original)
        return changed.view(output.shape)

    rows = rows.to(weight.device)
    with module.register_forward_hook(hook):
        yield


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Run `model` as in evaluation: no dropout, and eagerly, since compiled code misses hooks that are added later."""
    modules = list(model.modules())
    training = [module for module in modules if module.training]
    compiled = any(module._compiled_call_impl is not None or "_orig_mod" in module._modules for module in modules)
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Disable the gradients of all parameters of `model`, so that only what is optimised costs memory and time."""
    # By name: where weights are offloaded, every forward makes new parameters.
    learning = [name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    for name in learning:
        model.get_parameter(name).requires_grad_(False)
    try:
        yield
    finally:
        for name in learning:
            model.get_parameter(name).requires_grad_(True)
