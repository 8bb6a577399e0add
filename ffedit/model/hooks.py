"""Context managers that read or change the inputs and outputs of modules.

A transformer layer may return a bare tensor or a tuple whose first entry is the hidden state; this
has changed between releases of transformers. Only this module handles it: all others see the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Name = TypeVar("Name")


def tensor_of(output: Any) -> Tensor:
    """Return the hidden state in a module's output, [batch, tokens, d]."""
    tensor = output[0] if isinstance(output, tuple) else output
    if not isinstance(tensor, Tensor):
        raise TypeError(f"a tensor, or a tuple that begins with one, was expected; found {type(tensor).__name__}")
    return tensor


def like(output: Any, tensor: Tensor) -> Any:
    """Replace the hidden state in `output` by `tensor`."""
    return (tensor, *output[1:]) if isinstance(output, tuple) else tensor


@contextmanager
def capture(
    modules: Mapping[Name, nn.Module], inputs: bool = False, first: bool = False
) -> Iterator[dict[Name, Tensor]]:
    """Collect a copy of what `modules` receive (`inputs`) or return, by name; the last call wins.

    With `first`, inputs are captured before other hooks change them.

    A copy, since some blocks (Falcon's parallel ones) add to a module's output in place.
    """
    seen: dict[Name, Tensor] = {}

    def before(name: Name) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[name] = (args[0] if args else next(iter(kwargs.values()))).clone()

        return hook

    def after(name: Name) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            seen[name] = tensor_of(output).clone()

        return hook

    handles = [
        module.register_forward_pre_hook(before(name), prepend=first, with_kwargs=True)
        if inputs
        else module.register_forward_hook(after(name))
        for name, module in modules.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def calls(modules: Iterable[nn.Module]) -> Iterator[list[tuple[nn.Module, Tensor, Tensor]]]:
    """Collect each call that turns a tensor into a tensor, in order: the module, its input, its output.

    Of a tuple that begins with a tensor, this tensor.
    """
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        given = output[0] if isinstance(output, tuple) else output
        if args and isinstance(args[0], Tensor) and isinstance(given, Tensor):
            seen.append((module, args[0].clone(), given.clone()))

    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def leaves(module: nn.Module) -> list[nn.Module]:
    """Return the modules inside `module`, or itself, that have no submodules."""
    return [inner for inner in module.modules() if not list(inner.children())]


@contextmanager
def watched(module: nn.Module, see: Callable[[Tensor], None]) -> Iterator[None]:
    """Pass each output of `module` to `see`."""
    handle = module.register_forward_hook(lambda _, args, output: see(tensor_of(output)))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def capture_returned(module: nn.Module) -> Iterator[list[Any]]:
    """Collect each return value of `module`, unchanged."""
    things: list[Any] = []
    handle = module.register_forward_hook(lambda _, args, output: things.append(output))
    try:
        yield things
    finally:
        handle.remove()


@contextmanager
def replace_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Make `module` return `change(tensor)` instead of `tensor`."""
    handle = module.register_forward_hook(lambda _, args, output: like(output, change(tensor_of(output))))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def replace_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Make `module` receive `change(tensor)` instead of `tensor` as its first argument."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: change(kwargs[name])}

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def skipped(module: nn.Module, output: Any) -> Iterator[None]:
    """Make `module` return `output` without running."""
    # An instance attribute shadows the method, and may itself be shadowed already (accelerate's offloading does so).
    original = module.__dict__.get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        return output

    module.forward = forward
    try:
        yield
    finally:
        if original is None:
            del module.forward
        else:
            module.forward = original


@contextmanager
def only_at(module: nn.Module, rows: Tensor, positions: Tensor) -> Iterator[None]:
    """Run `module`, which acts on each position separately, at the pairs (row, position) only; it gives 0 elsewhere.

    A pair that is named twice counts once. A module that takes more than one tensor, or returns more, runs as usual.
    """
    rows, positions = torch.stack([rows, positions], 1).unique(dim=0).unbind(1)
    shadowing, original = module.__dict__.get("forward"), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and args[0].dim() == 3:
            given = original(args[0][rows, positions][None])
            if isinstance(given, Tensor):
                output = given.new_zeros(*args[0].shape[:-1], given.shape[-1])
                output[rows, positions] = given[0]
                return output
        return original(*args, **kwargs)

    module.forward = forward
    try:
        yield
    finally:
        if shadowing is None:
            del module.forward
        else:
            module.forward = shadowing


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Run `model` as in evaluation: no dropout, and its modules eagerly where `torch.compile` would fuse them.

    Compiled code misses hooks that are registered later, or is recompiled for each. Every module's mode is restored
    afterwards.
    """
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
