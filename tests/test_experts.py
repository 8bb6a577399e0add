"""Sparse experts are one memory: attention over all their keys and values, scaled by the router."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from ffedit.errors import ModelError
from ffedit.experts import Experts, Routed, routed
from ffedit.hooks import captured

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}

# name: (config, its arguments, parameters); GPT-OSS keeps experts transposed, with biases, gate and up interleaved.
FAMILIES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "mixtral": (hf.MixtralConfig, {"num_local_experts": 4}, 31_200),
    "qwen3_moe": (hf.Qwen3MoeConfig, {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8}, 31_232),
    "olmoe": (hf.OlmoeConfig, {"num_experts": 4, **_IDS}, 31_296),
    "gpt_oss": (hf.GptOssConfig, {"num_local_experts": 4, "head_dim": 8, **_ROPE, **_IDS}, 32_048),
}


def passed(family: str) -> tuple[nn.Module, Routed, Tensor]:
    """The experts of the last layer, what entered them in a real pass, and what they gave [n, d_model]."""
    config, arguments, parameters = FAMILIES[family]
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config(**_SHAPE, **arguments)).eval()
    assert model.num_parameters() == parameters, model.num_parameters()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    experts = model.model.layers[-1].mlp.experts
    ids = torch.arange(24).reshape(2, 12)
    with routed(experts) as entered, captured({0: experts}) as gave, torch.no_grad():
        model(input_ids=ids)
    assert not experts._forward_pre_hooks
    return experts, entered[0], gave[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_over_the_union_of_the_experts_memories_is_the_block(family: str) -> None:
    module, entered, output = passed(family)
    experts = Experts(module)
    assert experts.values.shape == (4 * 24, 32) and experts.coefficients(entered).shape == (24, 4 * 24)
    torch.testing.assert_close(experts.attend(entered), output, rtol=1e-5, atol=1e-5 * float(output.abs().max()))


def test_mixtral_is_the_sum_of_its_experts_memories_one_by_one() -> None:
    module, (x, chosen, weights), output = passed("mixtral")
    expected = torch.zeros(24, 32, dtype=torch.float64)
    for token in range(24):
        for expert, g in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = module.gate_up_proj[expert].double().detach().chunk(2)
            for i in range(24):
                z = x[token].double() @ gate[i]
                m = z * torch.sigmoid(z) * (x[token].double() @ up[i])
                expected[token] += g * m * module.down_proj[expert][:, i].double().detach()
    torch.testing.assert_close(Experts(module).attend(Routed(x, chosen, weights)).double(), expected)
    torch.testing.assert_close(output.double(), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_memories_of_experts_that_were_not_chosen_do_not_fire(family: str) -> None:
    module, entered, _ = passed(family)
    coefficients = Experts(module).coefficients(entered).reshape(24, 4, 24)
    silent = Experts(module).gates(entered) == 0
    assert silent.sum(1).tolist() == [2] * 24
    assert float(coefficients[silent].abs().max()) == 0 < float(coefficients[~silent].abs().min(0).values.max())
    assert not silent.all(0).any(), "every expert was chosen by some token"


def test_an_index_behind_the_last_expert_is_none() -> None:
    module, (x, chosen, weights), _ = passed("mixtral")
    gates = Experts(module).gates(Routed(x, torch.full_like(chosen, 4), weights))
    assert gates.shape == (24, 4) and float(gates.abs().max()) == 0


def test_a_module_that_does_not_declare_its_layout_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Linear without has_gate, .* is no block of experts"):
        Experts(nn.Linear(2, 2))
