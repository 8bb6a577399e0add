"""An edit in terms of memories: the memories that it adds, and the text that activates them.

The text of a corpus goes through the model twice, without and with the edit. The first pass gives the coefficients of
the added memories at every position (`edit_as_memory`): the prefixes with the largest are its triggers. Both give the
predictions: the positions where the predicted token lost most probability are shown, intended by the edit or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ffedit.inference.text import Corpus
from ffedit.inspector.analyses.distributions import Distribution, distribution, log_probabilities
from ffedit.inspector.interventions.edit_as_memory import Added, Change, added_memories
from ffedit.inspector.interventions.rereading import Passage, Reread, passage, reread
from ffedit.inspector.views.prompt_view import PromptView, inspect_prompt
from ffedit.inspector.views.view import View
from ffedit.model.editable import Editable, Stack
from ffedit.model.memory import Address
from ffedit.progress import Progress, silent

# Added memories that are shown of each layer.
MOST_ADDED = 3
# Facts whose prompts are inspected before and after.
MOST_FACTS = 3
# Tokens of the corpus, by default.
READ_TOKENS = 2**13


@dataclass(frozen=True)
class AddedMemory(View):
    """A memory that the update adds.

    Attributes:
        share: share of ‖Δ‖².
        written: whether the coefficient is 1 at a key that was solved for; else the key has norm 1.
        value: v through final norm and unembedding.
        triggers: prefixes of the corpus with the largest coefficients w·m.
    """

    share: float
    written: bool
    value: Distribution
    triggers: tuple[Passage, ...]


@dataclass(frozen=True)
class LayerChange(View):
    """One layer that changed, or one expert of a layer.

    Attributes:
        address: the layer, and the expert.
        norm: ‖Δ‖.
        relative: ‖Δ‖ / ‖W‖.
        added: the memories that the update adds.
    """

    address: Address
    norm: float
    relative: float
    added: tuple[AddedMemory, ...]


@dataclass(frozen=True)
class EditView(View):
    """An edit in terms of memories.

    Attributes:
        model: the model's name.
        edit: the edit's fingerprint.
        layers: the changes, layer by layer and expert by expert.
        corpus: the text that was read.
        tokens: number of positions that were read.
        changed: share of them at which the model predicts another token than before.
        passages: those at which the predicted token lost most probability, the largest loss first.
        prompts: views of the first facts' prompts, before and after.
    """

    model: str
    edit: str
    layers: tuple[LayerChange, ...]
    corpus: str
    tokens: int
    changed: float
    passages: tuple[Passage, ...]
    prompts: tuple[tuple[PromptView, PromptView], ...]


def inspect_edit(
    editable: Editable,
    edit: Change,
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
    edit.check(editable)
    corpus = corpus or Corpus(tokens=READ_TOKENS)
    added = {
        address: added_memories(address, update.cpu(), edit.keys[address], MOST_ADDED)
        for address, update in edit.updates.items()
    }
    found = reread(editable, edit, [one for some in added.values() for one in some], corpus, progress)
    layers = tuple(_layer(editable, edit, address, added[address], found, top) for address in sorted(added))
    prompts = [fact.text for fact in edit.facts[:MOST_FACTS]]
    before = [inspect_prompt(editable, prompt, top=top) for prompt in prompts]
    with edit.applied(editable):
        after = [inspect_prompt(editable, prompt, top=top) for prompt in prompts]
    return EditView(
        model=editable.name,
        edit=edit.fingerprint(),
        layers=layers,
        corpus=str(corpus),
        tokens=len(found.kept),
        changed=found.changed,
        passages=tuple(passage(editable.tokenizer, found, i) for i in found.positions.largest(found.lost, top)),
        prompts=tuple(zip(before, after, strict=True)),
    )


def _layer(
    stack: Stack, edit: Change, address: Address, added: Sequence[Added], found: Reread, top: int
) -> LayerChange:
    update, value = edit.updates[address].cpu(), stack.memories[address].value
    return LayerChange(
        address=address,
        norm=update.norm(),
        relative=update.norm() / float(torch.linalg.matrix_norm(value.float())),
        added=tuple(_added(stack, one, found, top) for one in added),
    )


def _added(stack: Stack, one: Added, found: Reread, top: int) -> AddedMemory:
    value = distribution(stack.tokenizer, log_probabilities(stack, one.value[None].float())[0], top)
    coefficients = found.coefficients[found.added.index(one)]
    triggers = tuple(
        passage(stack.tokenizer, found, i, coefficients) for i in found.positions.largest(coefficients, top)
    )
    return AddedMemory(one.share, one.written, value, triggers)
