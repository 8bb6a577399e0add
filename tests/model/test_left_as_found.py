"""Models in training and compiled ones are worked on, and left as they were found."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from making import made
from torch import nn
from writing import CORPUS, FACT, quick

import ffedit
from ffedit import Fact
from ffedit.editor.write import write as write_facts
from ffedit.model.editable import Editable


def state(model: nn.Module) -> list[Any]:
    """Everything about a model but its weights that ffedit might leave changed."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = [
        (name, m.training, m._compiled_call_impl, "forward" in vars(m), [len(getattr(m, hook)) for hook in hooks])
        for name, m in model.named_modules()
    ]
    return [*modules, *((name, p.requires_grad, p.grad) for name, p in model.named_parameters())]


def everything(editable: Editable) -> list[Any]:
    """What is done to a model, and what comes of it as plain numbers."""
    fact = Fact(FACT.subject, FACT.prompt, FACT.target, FACT.previous, paraphrases=("{} stands in",))
    trace = ffedit.locate(editable, fact, "state", samples=2)
    outputs = ffedit.locate(editable, fact, samples=2)
    edit = write_facts(editable, [fact], "memit", [1], quick(), CORPUS)
    tuned = write_facts(editable, [fact], "ft", [1], quick(ft_steps=2))
    report = ffedit.evaluate(editable, [fact], edit)
    assert report.after is not None
    solved = [one.updates[editable.memories[1].address].dense.tolist() for one in (edit, tuned)]
    found = trace.to_dict(), outputs.effects.tolist(), solved, report.before.to_dict(), report.after.to_dict()
    return json.loads(json.dumps(found))


def dropping() -> nn.Module:
    """A model that knows something, and that drops a tenth of it in every pass while it is trained."""
    model = zoo.trained("gpt2", True).model
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    return model


def test_a_model_in_training_is_read_in_evaluation_and_trains_on() -> None:
    expected = everything(zoo.trained("gpt2", True))
    model = dropping().train()
    model.transformer.h[2].eval()
    model.transformer.ln_f.weight.requires_grad_(False)
    model.transformer.h[0].register_forward_hook(lambda *_: None)
    before = state(model)
    editable = ffedit.load((model, zoo.words(True)))
    assert editable.model is model and state(model) == before
    assert everything(editable) == expected and state(model) == before
    assert not torch.equal(zoo.logits(model), zoo.logits(model)), "it drops again"


def test_an_error_leaves_a_model_in_training() -> None:
    model = dropping().train()
    editable, before = ffedit.load((model, zoo.words(True))), state(model)

    def fail(*_: Any) -> None:
        assert not model.training and not model.transformer.drop.training
        raise RuntimeError("on the way")

    handle = model.transformer.h[1].register_forward_hook(fail)
    for work in (
        lambda: ffedit.locate(editable, FACT, samples=2),
        lambda: write_facts(editable, [FACT], "rome", [1], quick(), CORPUS),
        lambda: ffedit.evaluate(editable, [FACT]),
    ):
        with pytest.raises(RuntimeError, match="on the way"):
            work()
    handle.remove()
    assert state(model) == before


def compiled_whole(model: nn.Module, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def compiled_in_place(model: nn.Module, backend: Any) -> Any:
    model.compile(backend=backend)
    return model


def compiled_by_layer(model: nn.Module, backend: Any) -> Any:
    for layer in model.transformer.h:  # type: ignore[union-attr]
        layer.compile(backend=backend)
    return model


@pytest.mark.parametrize("compiled", [compiled_whole, compiled_in_place, compiled_by_layer])
def test_a_compiled_model_is_worked_on_and_stays_compiled(compiled: Callable[[nn.Module, Any], Any]) -> None:
    expected = ffedit.locate(zoo.trained("gpt2", True), FACT, samples=2)
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = compiled(zoo.trained("gpt2", True).model, backend)
    first = zoo.logits(model)
    count = len(graphs)
    before = state(getattr(model, "_orig_mod", model))
    editable = ffedit.load((model, zoo.words(True)))
    assert editable.model is getattr(model, "_orig_mod", model)
    found = ffedit.locate(editable, FACT, samples=2)
    assert (found.effects == expected.effects).all() and found.effects.any()
    assert state(editable.model) == before and len(graphs) == count > 0, "nothing is compiled anew for our hooks"
    with made(editable, {1: 1}).applied(editable):
        torch.testing.assert_close(zoo.logits(model), zoo.logits(zoo_edited()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(zoo.logits(model), first, rtol=1e-5, atol=1e-5)
    assert len(graphs) == count
    torch.compiler.reset()


def zoo_edited() -> nn.Module:
    """The same model with the same edit, never compiled."""
    editable = zoo.trained("gpt2", True)
    made(editable, {1: 1}).apply_(editable)
    return editable.model
