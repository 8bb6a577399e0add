"""The reference that v* is compared with, held against the loss written out text by text, and against differences."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import zoo
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "evaluations" / "benchmarks"))

from reference_value import Objective, PlainValue, Text, plain_value

LAYER, DECAY, KL = 1, 0.5, 0.7
TEXTS = (Text((5, 9, 12, 20, 33), 4, 2), Text((41, 7, 5, 9, 12, 20, 33, 8), 6, 4), Text((3, 5, 9, 12, 60), 4, 3))
ESSENCE = (Text((9, 12, 17), 3, 1), Text((44, 9, 12, 17, 2), 5, 2))
FAMILIES = ("gpt2", "gpt_neox", "opt", "gpt2_square")
# Parts of these compute in float32 whatever the model's precision: too coarse for differences.
COARSE = ("llama", "gemma2", "bloom", "gpt_neo")
SIZES = {"steps": 12, "clamp": 4.0, "weight_decay": DECAY, "kl_weight": KL}


def parts(family: str) -> tuple[nn.Module, nn.Module, Tensor]:
    editable = zoo.build(family, dtype=torch.float64)
    memory = editable.memories[LAYER]
    return editable.model, memory.module, memory.value


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
            loss += KL * float((old.exp() * (old - new)).sum())
        return loss + DECAY * float(delta.norm() ** 2 / (W @ k).norm() ** 2)


@pytest.mark.parametrize("family", [*FAMILIES, *COARSE])
def test_the_loss_is_that_of_the_texts_one_by_one(family: str) -> None:
    model, module, W = parts(family)
    objective = Objective(model, module, W, TEXTS, ESSENCE, DECAY, KL)
    torch.manual_seed(3)
    near = 1e-6 if family in COARSE else 1e-9
    for delta in (torch.zeros(len(W)).double(), 0.3 * objective.scale * torch.randn(len(W)).double() / len(W) ** 0.5):
        assert objective(delta).item() == pytest.approx(brute(model, module, W, delta), rel=near)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_differences(family: str) -> None:
    model, module, W = parts(family)
    objective = Objective(model, module, W, TEXTS, ESSENCE, DECAY, KL)
    delta = torch.zeros(len(W), dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(objective(delta), delta)
    step = 1e-5 * objective.scale
    for entry in (0, 7, len(W) - 1):
        up, down = torch.zeros(2, len(W)).double()
        up[entry], down[entry] = step, -step
        slope = (brute(model, module, W, up) - brute(model, module, W, down)) / (2 * step)
        assert float(gradient[entry]) == pytest.approx(slope, rel=1e-4, abs=1e-6 * float(gradient.norm()))


def chosen(relative: bool, cosine: bool = False, step_size: float = 0.3, **changed: float) -> PlainValue:
    given = {"step_size": step_size, "relative": relative, "cosine": cosine, **SIZES, **changed}
    return plain_value(*parts("gpt2"), TEXTS, ESSENCE, **given)


@pytest.mark.parametrize("relative", [False, True])
def test_the_first_step_is_as_long_as_said(relative: bool) -> None:
    value = chosen(relative, steps=1, step_size=0.1)
    if relative:
        assert float(value.delta.norm()) == pytest.approx(0.1 * float((value.v - value.delta).norm()), rel=1e-4)
    else:
        torch.testing.assert_close(value.delta.abs(), torch.full_like(value.delta, 0.1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("cosine", [False, True])
def test_the_loss_falls(cosine: bool) -> None:
    losses = chosen(True, cosine).losses
    assert len(losses) == SIZES["steps"] and losses[-1] < losses[0] - 0.5


def test_no_value_passes_the_clamp() -> None:
    value = chosen(True, clamp=0.2)
    assert float(value.delta.norm()) == pytest.approx(0.2 * float((value.v - value.delta).norm()), rel=1e-9)


def test_it_ends_before_the_step_at_which_the_loss_is_low_enough() -> None:
    losses = chosen(True).losses
    stop = (losses[3] + losses[4]) / 2
    assert sorted(losses[:5], reverse=True) == list(losses[:5])
    ended = chosen(True, stop=stop)
    assert ended.losses == losses[:5]
    torch.testing.assert_close(ended.delta, chosen(True, steps=4).delta)


def test_the_model_is_as_before() -> None:
    model, module, W = parts("gpt2")
    before = W.clone()
    plain_value(model, module, W, TEXTS, ESSENCE, step_size=0.3, relative=True, cosine=True, **SIZES)
    assert torch.equal(W, before) and all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not module._forward_hooks and not module._forward_pre_hooks
