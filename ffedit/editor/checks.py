"""Refuse an edit that cannot be computed, before anything takes time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ffedit.editor.edit import Edit
from ffedit.editor.job import Method
from ffedit.errors import EditError
from ffedit.facts.fact import Fact
from ffedit.facts.fact_token import FactToken
from ffedit.model import hooks
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.fingerprint import fingerprint
from ffedit.model.storage import device_of, gives_gradient


def check_layers(editable: Editable, method: Method, layers: Sequence[int]) -> None:
    """Refuse no layers, layers that the model lacks, one named twice, and several for a method that writes to one."""
    if not method.layers and len(layers) != 1:
        raise EditError(f"{method.name} writes to a single layer, but layers {list(layers)} were named; name one")
    if not layers or len(set(layers)) < len(layers):
        raise EditError(f"layers {list(layers)} were asked for; name at least one, and each once")
    depth = len(editable.layers)
    for layer in layers:
        if not 0 <= layer < depth:
            raise EditError(f"layer {layer} was asked for, but {editable.name} has layers 0 to {depth - 1}")


def in_reach(editable: Editable, facts: Sequence[Fact], method: Method, layers: range, token: FactToken) -> range:
    """Return those of `layers` from which a value written at `token` reaches every answer; EditError if there is none.

    Fine-tuning writes no value at a token, but changes the layer at all tokens. FactError where a fact has no such
    token.
    """
    if not method.statistics:
        return layers
    last = len(editable.layers) - 1
    stated = ((body, fact.new_object, span) for fact in facts for body, span in fact.statements)
    texts = (replace(editable.encode(*statement), fact_token=token) for statement in stated)
    before_end = [text.site < text.answer - 1 for text in texts]
    if last not in layers or not any(before_end):
        return layers
    if len(layers) > 1:
        return layers[:-1]
    lower = "" if last == 0 else "name layer 0, or " if last == 1 else f"name a layer from 0 to {last - 1}, or "
    raise EditError(
        f"layer {last} is the last of {editable.name}, so no later layer can carry a change at the token {token} to "
        f"the prompt's end, where the answer is read; {lower}edit at the prompt's last token "
        "(--set key.fact_token=last)"
    )


def check_preserved(editable: Editable, preserve: Sequence[Edit]) -> None:
    """Refuse earlier edits of another model, and those that are not in its weights.

    The values of preserved keys are read from the weights, so an edit that is missing there would not be preserved. An
    edit that was computed on the current weights is accepted nonetheless.
    """
    for edit in preserve:
        for at, delta in edit.updates.items():
            shape = list(editable.memories[at].shape) if at in editable.memories else "none"
            if shape != list(delta.shape):
                raise EditError(
                    f"the earlier edit {edit.fingerprint()} changes a value matrix {list(delta.shape)} in layer {at}, "
                    f"where {editable.name} has {shape}; leave it out, or load the model for which it was made"
                )
    unknown = {name: edit for edit in preserve if (name := edit.fingerprint()) not in editable.history.known}
    current = fingerprint(editable) if unknown else ""
    for name, edit in unknown.items():
        if edit.base != current:
            raise EditError(
                f"the earlier edit {name} was computed on other weights than {editable.name} has, and is not in its "
                "history (a checkpoint that ffedit exports carries one); apply it first, or leave it out"
            )


def check_quantised(editable: Editable, method: Method, ff_layers: Sequence[FeedForward]) -> None:
    """Refuse edits that write to quantised weights while they are computed, and kernels that pass no gradients."""
    if not any(memory.quantised for ff in ff_layers for memory in ff.memories):
        return
    if len(ff_layers) > 1 or not method.statistics:
        raise EditError(
            f"{editable.name} is quantised, so {method.name} cannot write to layers {[ff.layer for ff in ff_layers]}; "
            "name a single layer, and a method with key statistics (memit)"
        )
    if ff_layers[0].mixture is not None:
        raise EditError(
            f"layer {ff_layers[0].layer} of {editable.name} is a mixture with quantised experts, in which the routes "
            "of an edit cannot be measured; name a layer without experts, or edit the model in 16 or 32 bits"
        )
    with hooks.eval_mode(editable.model):
        modules = [memory.module for memory in ff_layers[0].memories if memory.quantised]
        if not all(gives_gradient(module, device_of(module)) for module in modules):
            raise EditError(
                f"{editable.name} is quantised, and its kernels pass no gradient on this device, by which a value is "
                "chosen; use another --device, or edit the model in 16 or 32 bits and export an adapter"
            )
