"""The reference that v* is compared with, held against the loss written out text by text, and against differences."""

from __future__ import annotations

import pytest
import torch
import zoo
from reference_value import Objective, Text
from torch import Tensor, nn

LAYER, DECAY, KL = 1, 0.5, 0.7
TEXTS = (Text((5, 9, 12, 20, 33), 4, 2), Text((41, 7, 5, 9, 12, 20, 33, 8), 6, 4), Text((3, 5, 9, 12, 60), 4, 3))
ESSENCE = (Text((9, 12, 17), 3, 1), Text((44, 9, 12, 17, 2), 5, 2))
FAMILIES = ("gpt2", "gpt_neox", "opt", "gpt2_square")
# Parts of these compute in float32 whatever the model's precision: too coarse for differences.
COARSE = ("llama", "gemma2", "bloom", "gpt_neo")
SIZES = {"steps": 12, "max_delta_norm": 4.0, "weight_decay": DECAY, "kl_weight": KL}


def parts(family: str) -> tuple[nn.Module, nn.Module, nn.Module, Tensor]:
    editable = zoo.build(family, dtype=torch.float64)
    memory = editable.memories[LAYER]
    return editable.model, editable.layers[LAYER], memory.module, memory.value


def loss_of(objective: Objective, delta: Tensor) -> Tensor:
    """L(δ), with the decay relative to ‖W k*‖."""
    said, divergence = objective(delta)
    return KL * divergence + DECAY * delta.square().sum() / objective.current.norm() ** 2 - said.mean()


def brute(model: nn.Module, module: nn.Module, W: Tensor, delta: Tensor) -> float:
    """L(δ) with every text alone, δ in the module's bias-free output, no batch and no padding."""
    keys: list[Tensor] = []

    def log_probs(text: Text, change: Tensor) -> Tensor:
        def before(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            if text.answer < len(text.ids):
                keys.append(given[0].reshape(len(text.ids), -1)[text.subject_last])

        def after(_: nn.Module, __: object, output: Tensor) -> Tensor:
            where = torch.zeros(len(text.ids), 1, dtype=W.dtype)
            where[text.subject_last] = 1
            return output + (where * change).reshape(output.shape)

        handles = module.register_forward_pre_hook(before), module.register_forward_hook(after)
        result = model(input_ids=torch.tensor([text.ids])).logits[0].log_softmax(-1)
        for handle in handles:
            handle.remove()
        return result

    with torch.no_grad():
        loss = 0.0
        for text in TEXTS:
            given = log_probs(text, delta)
            loss -= sum(float(given[i - 1, text.ids[i]]) for i in range(text.answer, len(text.ids))) / len(TEXTS)
        k = torch.stack(keys).mean(0)
        for text in ESSENCE:
            old, new = log_probs(text, 0 * delta)[-1], log_probs(text, delta)[-1]
            loss += KL * float((old.exp() * (old - new)).sum()) / len(ESSENCE)
        return loss + DECAY * float(delta.norm() ** 2 / (W @ k).norm() ** 2)


@pytest.mark.parametrize("family", [*FAMILIES, *COARSE])
def test_the_loss_is_that_of_the_texts_one_by_one(family: str) -> None:
    model, block, module, W = parts(family)
    objective = Objective(model, block, module, W, TEXTS, ESSENCE)
    torch.manual_seed(3)
    near, size = 1e-6 if family in COARSE else 1e-9, float(objective.current.norm()) / len(W) ** 0.5
    for delta in (torch.zeros(len(W)).double(), 0.3 * size * torch.randn(len(W)).double()):
        assert loss_of(objective, delta).item() == pytest.approx(brute(model, module, W, delta), rel=near)
