"""An edit as a LoRA adapter: Δ = B A is what a low-rank edit is anyway.

The folder is PEFT's (arXiv 2106.09685), so that anything that loads LoRA adapters can put the edit on the base, a
quantised one too. Each layer has its own rank, alpha equals the rank (scale 1), and modules are named by their full
paths: `c_proj` alone would also be GPT-2's attention.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffedit.editor import Edit
from ffedit.errors import EditError
from ffedit.lowrank import LowRank
from ffedit.shipping.plan import matrix
from ffedit.shipping.tensors import write

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(folder: Path, base: str, edit: Edit, revision: str | None = None) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`.

    Args:
        folder: an empty folder.
        base: hub id or folder of the base, as PEFT loads it.
        edit: with `provenance["matrices"]`.
        revision: of a hub id.

    Raises:
        EditError: an update is dense, or of an expert among others in one tensor.
    """
    ranks: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    transposed = set()
    for address, update in edit.updates.items():
        if not isinstance(update, LowRank):
            raise EditError(
                f"the update of layer {address} is dense, which no adapter of low rank holds; export a checkpoint or a "
                "delta (--format)"
            )
        about = matrix(edit, address)
        if about["parameter"].endswith("]"):
            raise EditError(
                f"the edit writes to expert {address}, one matrix of a tensor of several, for which an adapter has no "
                "place of its own; export a checkpoint or a delta (--format)"
            )
        path = about["parameter"].removesuffix(".weight")
        left, right = balanced(update)
        ranks[path] = len(right)
        transposed.add(about["transposed"])
        tensors[f"base_model.model.{path}.lora_A.weight"] = right.float()
        tensors[f"base_model.model.{path}.lora_B.weight"] = left.float()
    if len(transposed) > 1:
        raise EditError("the edit changes matrices of both orientations, which one adapter cannot hold; export a delta")
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": transposed.pop(),
        "r": max(ranks.values()),
        "lora_alpha": max(ranks.values()),
        "lora_dropout": 0.0,
        "target_modules": sorted(ranks),
        "rank_pattern": ranks,
        "alpha_pattern": ranks,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write(folder / WEIGHTS, {name: (t.dtype, tuple(t.shape), [t]) for name, t in tensors.items()})


def balanced(update: LowRank) -> tuple[Tensor, Tensor]:
    """Factors of one size: Δ = U S Vᵀ as (U √S) (√S Vᵀ), so that 16 bits lose little of either.

    Returns:
        [d_out, r] and [r, d_in], float64; r is the rank of Δ, at least 1.
    """
    # The SVD of a thin product is that of an r × r matrix between two orthonormal ones.
    q, inner = torch.linalg.qr(update.left.double())
    p, outer = torch.linalg.qr(update.right.double().T)
    u, s, vh = torch.linalg.svd(inner @ outer.T)
    rank = max(1, int((s > s.max() * 1e-12).sum()))
    root = s[:rank].sqrt()
    return (q @ u[:, :rank]) * root, root[:, None] * (vh[:rank] @ p.T)
