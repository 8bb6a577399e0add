"""An edit in terms of memories: the memories that it adds, the text that activates them, and what it predicts anew."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ffedit.editor.edit import Edit, check_edit
from ffedit.facts.text import change
from ffedit.inference.corpus import Corpus
from ffedit.inspector.distributions import Distribution, distribution, log_probabilities
from ffedit.inspector.edit_as_memory import Passage, added_memories, reread
from ffedit.inspector.slots import View
from ffedit.inspector.views.prompt_view import PromptView, inspect_prompt
from ffedit.model.editable import Editable, check_model
from ffedit.model.memory import Address
from ffedit.notebook import Displayed
from ffedit.progress import Progress, silent

# Added memories that are shown of each layer.
MOST_ADDED = 3
# Facts whose prompts are inspected before and after.
MOST_FACTS = 3
# Tokens of the corpus, by default.
READ_TOKENS = 2**13


@dataclass(frozen=True)
class AddedMemory(View):
    """A memory that the update adds."""

    share: float  # share of ‖Δ‖²
    written: bool  # whether the coefficient is 1 at a key that was solved for; else the key has norm 1
    value: Distribution  # v through final norm and unembedding
    triggers: tuple[Passage, ...]  # prefixes of the corpus with the largest coefficients w·m


@dataclass(frozen=True)
class LayerChange(View):
    """One layer that changed, or one expert of a layer."""

    address: Address  # the layer, and the expert
    norm: float  # ‖Δ‖
    relative: float  # ‖Δ‖ / ‖W‖
    added: tuple[AddedMemory, ...]  # the memories that the update adds


@dataclass(frozen=True)
class EditView(View, Displayed):
    """An edit in terms of memories.

    Attributes:
        model: the model's name.
        edit: the edit's fingerprint.
        facts: what each fact changes, in words.
        layers: the changes, layer by layer and expert by expert.
        corpus: the text that was read.
        tokens: number of positions that were read.
        changed: share of them at which the model predicts another token than before.
        passages: those at which the predicted token lost most probability, the largest loss first.
        prompts: views of the first facts' prompts, before and after.
    """

    model: str
    edit: str
    facts: tuple[str, ...]
    layers: tuple[LayerChange, ...]
    corpus: str
    tokens: int
    changed: float
    passages: tuple[Passage, ...]
    prompts: tuple[tuple[PromptView, PromptView], ...]

    def __repr__(self) -> str:
        layers = ", ".join(str(layer.address) for layer in self.layers)
        return (
            f"EditView of {self.edit} in {self.model}: layers {layers}\n  the prediction changes after "
            f"{self.changed:.2%} of {self.tokens:,} tokens of {self.corpus}"
        )


def inspect_edit(
    editable: Editable,
    edit: Edit,
    corpus: Corpus | None = None,
    top: int = 5,
    progress: Progress = silent,
) -> EditView:
    """Return an edit as the memories that it adds. The model is left unchanged.

    Args:
        editable: the model that the edit was computed on, without it.
        edit: the edit.
        corpus: the text to read; by default text that the model samples.
        top: number of triggers, passages and tokens that are shown, each.
        progress: progress callback.

    Raises:
        EditError: the edit does not fit the model or is applied already, or the corpus cannot be used.
    """
    check_model(editable, Editable)
    check_edit(edit)
    edit.check(editable)
    corpus, tokenizer = corpus or Corpus(tokens=READ_TOKENS), editable.tokenizer
    updates = {address: edit.updates[address].cpu() for address in sorted(edit.updates)}
    memories = [m for at, update in updates.items() for m in added_memories(at, update, edit.keys[at], MOST_ADDED)]
    text = reread(editable, edit, memories, corpus, progress)
    added: dict[Address, list[AddedMemory]] = {address: [] for address in updates}
    for memory, coefficients in zip(memories, text.coefficients, strict=True):
        value = distribution(tokenizer, log_probabilities(editable, memory.value[None].float())[0], top)
        triggers = text.largest(tokenizer, coefficients, top, coefficients)
        added[memory.address].append(AddedMemory(memory.share, memory.written, value, triggers))
    layers = []
    for address, update in updates.items():
        relative = update.norm() / float(torch.linalg.matrix_norm(editable.memories[address].value.float()))
        layers.append(LayerChange(address, update.norm(), relative, tuple(added[address])))
    prompts = [fact.text for fact in edit.facts[:MOST_FACTS]]
    before = [inspect_prompt(editable, prompt, top=top) for prompt in prompts]
    with edit.applied(editable):
        after = [inspect_prompt(editable, prompt, top=top) for prompt in prompts]
    return EditView(
        model=editable.name,
        edit=edit.fingerprint(),
        facts=tuple(change(fact.subject, fact.previous, fact.target) for fact in edit.facts),
        layers=tuple(layers),
        corpus=str(corpus),
        tokens=len(text.kept),
        changed=text.changed,
        passages=text.largest(tokenizer, text.lost, top),
        prompts=tuple(zip(before, after, strict=True)),
    )
