"""An edit stores what the algebra says, measured in the real forward pass."""

from __future__ import annotations

import pytest
import torch
import zoo
from torch import Tensor
from writing import CORPUS, FACT, SECOND, collect_moments, families, write

from ffedit import Fact
from ffedit.algebra.low_rank import LowRank
from ffedit.algebra.updates import equality
from ffedit.model.editable import Editable
from ffedit.model.hooks import capture
from ffedit.model.tokenization import encode

pytestmark = pytest.mark.usefixtures("warm_cache")


def at_subject(editable: Editable, layer: int, fact: Fact = FACT) -> tuple[Tensor, Tensor]:
    """What the value matrix receives and gives at the subject's last token, in a plain forward pass."""
    found = encode(editable.tokenizer, fact.text, span=fact.span)
    module = {0: editable.memories[layer].module}
    with capture(module, inputs=True) as keys, capture(module) as values, torch.no_grad():
        editable.model(input_ids=torch.tensor([found.ids]))
    position = found.subject_last
    return keys[0].reshape(-1, keys[0].shape[-1])[position], values[0].reshape(-1, zoo.WIDTH)[position]


# What is stored -----------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("layer", [0, 1])
def test_the_update_gives_the_value_at_the_key_exactly(family: str, bos: bool, layer: int) -> None:
    editable = zoo.trained(family, bos)
    memory, edit = editable.memories[layer], write(editable, layer=layer)
    delta, k, v = (part[memory.address] for part in (edit.updates, edit.keys, edit.values))
    torch.testing.assert_close(delta @ k, v - memory.value.double() @ k, rtol=1e-9, atol=1e-9)
    assert float((delta @ k).norm()) > 1e-3
    with edit.applied(editable), torch.no_grad():
        bias = 0 if memory.bias is None else memory.bias
        torch.testing.assert_close(memory.module(k[:, 0].float()) - bias, v[:, 0].float(), rtol=1e-4, atol=1e-4)


@families
def test_one_and_the_same_key_stands_in_numerator_and_denominator(family: str, bos: bool) -> None:
    editable = zoo.trained(family, bos)
    memory = editable.memories[1]
    edit = write(editable, contexts=4, context_weight=0.0, keep_beginning=False)
    k, v = edit.keys[memory.address][:, 0], edit.values[memory.address][:, 0]
    C = collect_moments(editable, memory, CORPUS).C
    stored = edit.updates[memory.address].dense
    torch.testing.assert_close(stored, equality(memory.value, k[:, None], v[:, None], C).dense, rtol=1e-9, atol=1e-12)
    bare = at_subject(editable, 1)[0].double()
    assert float((k - bare).norm()) > 1e-3 * float(bare.norm()), "contexts make k* differ from the bare prompt's key"
    u = torch.linalg.solve(C, k)
    assert not torch.allclose(stored, torch.outer(v - memory.value.double() @ k, u / (bare @ u)), rtol=1e-3)


@families
def test_the_key_is_the_mean_over_the_contexts_named_in_the_provenance(family: str, bos: bool) -> None:
    editable = zoo.trained(family, bos)
    memory, edit = editable.memories[1], write(editable, contexts=3)
    contexts = edit.provenance["solved"][0]["contexts"]
    assert contexts, "the model's own prefixes, written down"
    texts = [FACT.text, *(lead + (" " if lead[-1] in ".!?" else ". ") + FACT.text for lead in contexts)]
    facts = [Fact(FACT.subject, text, "Rome", occurrence=text.count(FACT.subject) - 1) for text in texts]
    with edit.applied(editable):
        outputs = torch.stack([at_subject(editable, 1, fact)[1] for fact in facts]).double()
    keys = torch.stack([at_subject(editable, 1, fact)[0] for fact in facts]).double()
    torch.testing.assert_close(keys.mean(0), edit.keys[memory.address][:, 0], rtol=1e-3, atol=1e-5)
    bias = 0 if memory.bias is None else memory.bias.double()
    torch.testing.assert_close(outputs.mean(0) - bias, edit.values[memory.address][:, 0], rtol=1e-3, atol=1e-3)


# Several facts ------------------------------------------------------------------------------------


@families
def test_facts_are_written_one_upon_the_other(family: str, bos: bool) -> None:
    editable = zoo.trained(family, bos)
    memory, edit = editable.memories[0], write(editable, FACT, SECOND, layer=0)
    delta, keys, values = (part[memory.address] for part in (edit.updates, edit.keys, edit.values))
    assert edit.rank == 2 and int(torch.linalg.matrix_rank(delta.dense)) <= 2 and keys.shape[1] == 2
    assert edit.facts == (FACT, SECOND) and edit.layers == [0]
    last = (memory.value.double() + delta.dense) @ keys[:, 1]
    torch.testing.assert_close(last, values[:, 1], rtol=1e-4, atol=1e-5)
    first = LowRank(delta.left[:, :1], delta.right[:1])
    torch.testing.assert_close(first @ keys[:, 0], values[:, 0] - memory.value.double() @ keys[:, 0])
    alone = write(editable, FACT, layer=0).updates[memory.address]
    torch.testing.assert_close(first.dense, alone.dense, rtol=1e-6, atol=1e-9)


def test_the_same_seed_gives_the_same_edit_and_another_seed_another() -> None:
    editable = zoo.trained("gpt_neo")
    first, again, other = (write(editable, seed=seed) for seed in (3, 3, 4))
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert first.provenance["config"]["seed"] == 3
    address = editable.memories[1].address
    assert torch.equal(first.updates[address].dense, again.updates[address].dense)
