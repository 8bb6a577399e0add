"""Fine-tuning, the baseline: the gradient of the mean loss, within its bound."""

from __future__ import annotations

import pytest
import torch
import zoo
from storing import FACTS, write
from writing import FACT, quick

from ffedit.editor.key import build_prompts
from ffedit.editor.methods import finetune
from ffedit.editor.write import write as write_facts
from ffedit.facts.fact import by_subject


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_fine_tuning_lowers_the_loss_and_its_bound_holds_entry_by_entry(family: str) -> None:
    editable = zoo.trained(family, True)
    memory, config = editable.memories[1], quick(ft_steps=30)
    scale = float(memory.value.square().mean().sqrt())
    free, bounded = (write_facts(editable, FACTS, name, [1], config) for name in ("ft", "ft-l"))
    for edit in (free, bounded):
        (solved,) = edit.provenance["solved"]
        assert solved["loss"][-1] < solved["loss"][0] - 0.05 and len(solved["loss"]) == 30
        assert edit.keys[memory.address].shape == (memory.d_ff, 0) and edit.provenance["statistics"] == {}
        assert edit.facts == FACTS and edit.updates[memory.address].shape == memory.value.shape
    most = [float(edit.updates[memory.address].dense.abs().max()) for edit in (free, bounded)]
    assert most[1] <= config.methods["ft-l"].bound * scale * (1 + 1e-6) < most[0]
    assert bounded.norms()[memory.address] < free.norms()[memory.address]


def test_fine_tuning_takes_the_gradient_of_the_mean_loss_over_the_prompts() -> None:
    editable, config = zoo.trained("gpt2", True), quick(ft_steps=1, ft_rate=1e-3)
    memory = editable.memories[1]
    texts = [text for prompt_set in build_prompts(editable, by_subject(FACTS), quick()) for text in prompt_set.prompts]
    loss = torch.zeros(())
    for text in texts:
        logits = editable.model(input_ids=torch.tensor([text.ids])).logits[0].log_softmax(-1)
        for i in range(text.answer, len(text.ids)):
            loss = loss - logits[i - 1, text.ids[i]] / len(texts)
    (gradient,) = torch.autograd.grad(loss, memory.weight)
    edit = write_facts(editable, FACTS, "ft", [1], config)
    step = edit.updates[memory.address].dense
    gradient = gradient.T if memory.stored_transposed else gradient
    some = gradient.abs() > 1e-4 * gradient.abs().max()
    assert bool((torch.sign(step)[some] == -torch.sign(gradient)[some]).all()), "Adam's first step is the sign"
    assert edit.provenance["solved"][0]["loss"] == [pytest.approx(loss.item(), rel=1e-5)]


def test_fine_tuning_ends_where_the_loss_is_low_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 1e-2, as published, whatever the numbers of the other methods say."""
    assert finetune.STOP == 1e-2
    editable = zoo.trained("gpt2", True)
    (whole,) = write(editable, [FACT], "ft", ft_steps=8, target_loss=1e9).provenance["solved"]
    monkeypatch.setattr(finetune, "STOP", whole["loss"][4] * 1.0001)
    (solved,) = write(editable, [FACT], "ft", ft_steps=8).provenance["solved"]
    assert len(whole["loss"]) == 8 and solved["loss"] == whole["loss"][:5]
