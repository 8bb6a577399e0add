"""An edit in terms of memories: the values that changed, the memories that it adds, and the text that activates them.

The text of a corpus goes through the model twice, without and with the edit. The first pass gives the coefficients of
the added memories at every position (`edit_as_memory`): the prefixes with the largest are its triggers. Both give the
predictions: the positions where the predicted token lost most probability are shown, intended by the edit or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ffedit.algebra.low_rank import Update
from ffedit.inference.text import Corpus
from ffedit.inspector.analyses.distributions import Distribution, Said, distribution, log_probabilities, said
from ffedit.inspector.interventions.edit_as_memory import Added, Change, added_memories, column_norms, columns
from ffedit.inspector.interventions.rereading import Passage, Reread, passage, reread
from ffedit.inspector.views.prompt_view import PromptView, inspect_prompt
from ffedit.inspector.views.slots import Slot
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
class ChangedValue(View):
    """A value column that changed.

    Attributes:
        slot: the memory of the value.
        norm: ‖Δ_i‖.
        relative: ‖Δ_i‖ / ‖v_i‖.
        coefficient: mean coefficient of this memory in the keys that were solved for; None without any.
        moved: total variation distance between the value's distributions before and after, 0 to 1.
        before: the value's top token.
        after: the edited value's top token.
    """

    slot: Slot
    norm: float
    relative: float
    coefficient: float | None
    moved: float
    before: Said
    after: Said


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
        memories: number of its values.
        most: the values that changed most, by norm.
        added: the memories that the update adds.
    """

    address: Address
    norm: float
    relative: float
    memories: int
    most: tuple[ChangedValue, ...]
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
    """Return an edit as the memories that it changes and the memories that it adds. The model is left unchanged.

    Args:
        editable: the model that the edit was computed on, without it.
        edit: the edit.
        corpus: the text to read; by default text that the model samples.
        top: number of values, triggers, passages and tokens that are shown, each.
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
    memory = stack.memories[address]
    update, value = edit.updates[address].cpu(), memory.value
    return LayerChange(
        address=address,
        norm=update.norm(),
        relative=update.norm() / float(torch.linalg.matrix_norm(value.float())),
        memories=memory.d_ff,
        most=_most(stack, memory_value=value, update=update, keys=edit.keys[address], address=address, top=top),
        added=tuple(_added(stack, one, found, top) for one in added),
    )


def _most(
    stack: Stack, memory_value: Tensor, update: Update, keys: Tensor, address: Address, top: int
) -> tuple[ChangedValue, ...]:
    """Return the value columns that changed most, with their top tokens before and after."""
    norms = column_norms(update)
    most = norms.topk(min(top, len(norms))).indices.tolist()
    old = memory_value[:, most].T.cpu().double()
    before, after = (log_probabilities(stack, some.float()) for some in (old, old + columns(update, most)))
    moved = (before.exp() - after.exp()).abs().sum(1) / 2
    return tuple(
        ChangedValue(
            slot=Slot(address, i),
            norm=float(norms[i]),
            relative=float(norms[i] / torch.linalg.vector_norm(old[n])),
            coefficient=float(keys[i].mean()) if keys.shape[1] else None,
            moved=float(moved[n]),
            before=said(stack.tokenizer, before[n]),
            after=said(stack.tokenizer, after[n]),
        )
        for n, i in enumerate(most)
    )


def _added(stack: Stack, one: Added, found: Reread, top: int) -> AddedMemory:
    value = distribution(stack.tokenizer, log_probabilities(stack, one.value[None].float())[0], top)
    coefficients = found.coefficients[found.added.index(one)]
    triggers = tuple(
        passage(stack.tokenizer, found, i, coefficients) for i in found.positions.largest(coefficients, top)
    )
    return AddedMemory(one.share, one.written, value, triggers)
