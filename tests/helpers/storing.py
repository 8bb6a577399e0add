"""What the tests of the methods share: batches of facts, and what a real forward pass finds at their subjects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import zoo
from torch import Tensor
from writing import CORPUS, FACT, SECOND, quick

from ffedit import Edit, EditConfig, Fact
from ffedit.editor.key import PromptSet, build_prompts
from ffedit.editor.write import write as write_facts
from ffedit.facts.fact import by_subject
from ffedit.model.editable import Editable
from ffedit.model.hooks import capture
from ffedit.model.memory import Address
from ffedit.model.tokenization import encode

BATCH, EXACT = ("emmet", "memit", "alphaedit"), ("rome", "emmet")
SOLVING = ("rome", *BATCH)
# Another subject each, and one with two facts.
THIRD = Fact("Nile river", "the {} is located in", "Berlin", "Egypt")
AGAIN = Fact("Eiffel tower", "the city of {} is", "Berlin", "Paris")
FACTS = (FACT, SECOND, THIRD)
BARE = {"contexts": 0, "essence_prompts": ()}


def write(
    editable: Editable,
    facts: Sequence[Fact],
    method: str,
    layers: Sequence[int] = (1,),
    preserve: Sequence[Edit] = (),
    **numbers: Any,
) -> Edit:
    return write_facts(editable, facts, method, layers, quick(**numbers), CORPUS, preserve)


def outputs(editable: Editable, layer: int, prompt_sets: Sequence[PromptSet]) -> Tensor:
    """What the value matrix gives at each subject, mean over the texts that state its facts, one plain pass each."""
    memory, columns = editable.memories[layer], []
    for prompt_set in prompt_sets:
        rows = []
        for text in prompt_set.prompts:
            with capture({0: memory.module}) as given, torch.no_grad():
                editable.model(input_ids=torch.tensor([text.ids]))
            rows.append(given[0].reshape(len(text.ids), -1)[text.subject_last])
        columns.append(torch.stack(rows).double().mean(0) - (0 if memory.bias is None else memory.bias.double()))
    return torch.stack(columns, 1)


def missed(editable: Editable, edit: Edit, config: EditConfig, layer: int = 1) -> Tensor:
    """How much of what was asked for each subject is missed in real forward passes with the edit applied, [n]."""
    at = Address(layer)
    # The texts are the model's own, so they are made before it changes.
    prompt_sets = build_prompts(editable, by_subject(edit.facts), config)
    before = outputs(editable, layer, prompt_sets)
    with edit.applied(editable):
        after = outputs(editable, layer, prompt_sets)
    return (edit.values[at] - after).norm(dim=0) / (edit.values[at] - before).norm(dim=0)


def missed_in_prompt(editable: Editable, edit: Edit, layer: int) -> float:
    """How much of what ROME asked for is missed in a pass of the fact's prompt, all memories of a layer joined."""
    (fact,) = edit.facts
    text = encode(editable.tokenizer, fact.text, span=fact.span)

    def given() -> Tensor:
        with capture({0: editable.feed_forward[layer].module}) as outputs, torch.no_grad():
            editable.model(input_ids=torch.tensor([text.ids]))
        return outputs[0].reshape(len(text.ids), -1)[text.subject_last].double()

    parts = [editable.memories[at] for at in edit.updates]
    asked = sum(edit.values[part.address] - part.value.double() @ edit.keys[part.address] for part in parts)[:, 0]
    before = given()
    with edit.applied(editable):
        return float((given() - before - asked).norm() / asked.norm())


def clean(editable: Editable, before: dict[str, Tensor]) -> bool:
    """Whether nothing of a method is left in the model: weights, hooks, gradients."""
    modules = list(editable.model.modules())
    return (
        zoo.unchanged(editable, before)
        and all(p.requires_grad and p.grad is None for p in editable.model.parameters())
        and not any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in modules)
    )
