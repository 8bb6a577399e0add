"""The formulas of mixtures of experts, one token at a time, as their families publish them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from ffedit.model.editable import Editable

PROMPT = "the Eiffel tower is located in"
PLAIN = ["mixtral", "qwen2_moe", "gpt_oss", "llama4"]
SHARED = ("qwen2_moe", "llama4")


def plain_expert(family: str, block: Any, expert: int, x: Tensor) -> Tensor:
    """m_e [d_ff] of what an expert receives, x [d_model]."""
    first = block.experts.gate_up_proj[expert]
    if family == "gpt_oss":
        z = x @ first + block.experts.gate_up_proj_bias[expert]
        gate, up = z[::2].clamp(max=7.0), z[1::2].clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    gate, up = (x @ first if family == "llama4" else first @ x).chunk(2)
    return silu(gate) * up


def plain(family: str, block: Any, x: Tensor) -> tuple[dict[int, float], dict[int, Tensor]]:
    """The weights of the experts that one token goes to, and its keys k_e."""
    router = block.router if family in ("gpt_oss", "llama4") else block.gate
    logits = router.weight @ x + (router.bias if family == "gpt_oss" else 0)
    top = logits.topk(1 if family == "llama4" else 2)
    scores = {"gpt_oss": top.values.softmax(0), "llama4": top.values.sigmoid()}.get(family)
    if scores is None:
        scores = logits.softmax(0)[top.indices]
        scores = scores / scores.sum() if family == "mixtral" else scores
    weights = {expert: float(g) for expert, g in zip(top.indices.tolist(), scores, strict=True)}
    keys = {
        e: plain_expert(family, block, e, g * x) if family == "llama4" else g * plain_expert(family, block, e, x)
        for e, g in weights.items()
    }
    if family in SHARED:
        own = block.shared_expert
        weights[4] = float(torch.sigmoid(block.shared_expert_gate(x))) if family == "qwen2_moe" else 1.0
        keys[4] = weights[4] * silu(own.gate_proj.weight @ x) * (own.up_proj.weight @ x)
    return weights, keys


def block_of(editable: Editable, layer: int) -> Any:
    mixture = editable.feed_forward[layer].mixture
    assert mixture is not None
    return mixture.block


def values_of(family: str, block: Any, expert: int) -> Tensor:
    """V_e [d_ff, d_model]."""
    if expert == 4:
        return block.shared_expert.down_proj.weight.T
    stored = block.experts.down_proj[expert]
    return stored if family in ("gpt_oss", "llama4") else stored.T
