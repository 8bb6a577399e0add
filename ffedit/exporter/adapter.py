"""An edit without its base, as a LoRA adapter.

A low-rank edit already has the form Δ = B A. The adapter's folder is PEFT's (arXiv 2106.09685), so that anything that
loads LoRA adapters can put the edit on the base, even on a quantised one. Each layer has its own rank, alpha equals the
rank (scale 1), and modules are named by their full paths: `c_proj` alone would also match GPT-2's attention.

Experts that share one parameter also share one pair of factors: the rows of A [E r, d_ff] are ordered expert by
expert, and the columns of B [d_model, r E] cycle through the experts. All experts have the same rank; those that were
not edited hold zeros. In a mixture everything is named by its parameter, dense layers and shared experts too: there
PEFT takes a module called `down_proj` for the older layout's experts, and for those of all layers. PEFT reads
parameter names only on a base that is not quantised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.algebra.low_rank import LowRank
from ffedit.editor.edit import Edit
from ffedit.errors import EditError
from ffedit.exporter.checkpoint import identity_in
from ffedit.files.tensor_ranges import Stored, of_expert, write

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."

Factors: TypeAlias = tuple[Tensor, Tensor]


def write_adapter(folder: Path, base: str, edit: Edit, revision: str | None = None, mixture: bool = False) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`, of an edit with `provenance["matrices"]`.

    `base` is the name that PEFT loads the base by, with the `revision` of a hub id; `mixture` says if it has experts,
    even where the edit changes none. Raises EditError where an update is dense, or the matrices do not fit one adapter.
    """
    factors: dict[str, dict[int | None, Factors]] = {}
    experts: dict[str, int] = {}
    transposed: set[bool] = set()
    for address, update in edit.updates.items():
        if not isinstance(update, LowRank):
            raise EditError(
                f"the update of layer {address} is dense, and a low-rank adapter cannot contain it; export a "
                "checkpoint (--format)"
            )
        matrix = identity_in(edit, address)
        parameter, expert = of_expert(matrix["parameter"])
        factors.setdefault(parameter, {})[expert] = _as_peft_stores(balanced(update), matrix)
        experts[parameter] = 1 if expert is None else matrix["experts"]
        transposed.add(expert is None and matrix["transposed"])
    if len(transposed) > 1:
        raise EditError(
            "the edit changes matrices of both orientations, and one adapter cannot contain both; export a checkpoint"
        )
    by_parameter = mixture or any(None not in pairs for pairs in factors.values())
    ranks: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    for parameter, pairs in factors.items():
        module = parameter.rpartition(".")[0]
        left, right = pairs[None] if None in pairs else _side_by_side(pairs, experts[parameter])
        ranks[parameter if by_parameter else module] = len(right) // experts[parameter]
        tensors |= {f"{PREFIX}{module}.lora_A.weight": right.float(), f"{PREFIX}{module}.lora_B.weight": left.float()}
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
        "target_modules": [] if by_parameter else sorted(ranks),
        **({"target_parameters": sorted(ranks)} if by_parameter else {}),
        "rank_pattern": ranks,
        "alpha_pattern": ranks,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write(folder / WEIGHTS, {name: (t.dtype, tuple(t.shape), [t]) for name, t in tensors.items()})


def read_factors(stored: Mapping[str, Stored], about: Mapping[str, Any]) -> Factors:
    """Read the factors that an adapter adds to the matrix described by `about`: [d_out, r] and [r, d_in], float64."""
    parameter, expert = of_expert(about["parameter"])
    module = parameter.rpartition(".")[0]
    right, left = (stored[f"{PREFIX}{module}.lora_{side}.weight"] for side in "AB")
    b = double(left.rows(0, left.shape[0]))
    if expert is None:
        return b, double(right.rows(0, right.shape[0]))
    rank = right.shape[0] // about["experts"]
    a = double(right.rows(expert * rank, (expert + 1) * rank))
    return _as_peft_stores((b.view(len(b), rank, -1)[:, :, expert], a), about)


def _as_peft_stores(factors: Factors, matrix: Mapping[str, Any]) -> Factors:
    """Convert the factors of Δ to those that PEFT stores, or back.

    They are swapped and transposed for experts that a module stores transposed without declaring it (Llama 4).
    """
    left, right = factors
    return (right.T, left.T) if matrix["transposed"] and matrix.get("declared") is False else factors


def _side_by_side(by_expert: Mapping[int | None, Factors], experts: int) -> Factors:
    """Join the factors of all experts of a parameter, zeros where there are none: [d_out, r E] and [E r, d_in]."""
    rank = max(len(right) for _, right in by_expert.values())
    left, right = next(iter(by_expert.values()))
    b = left.new_zeros(len(left), rank, experts)
    a = right.new_zeros(experts, rank, right.shape[1])
    for expert, (left, right) in by_expert.items():
        b[:, : len(right), expert], a[expert, : len(right)] = left, right
    return b.flatten(1), a.flatten(0, 1)


def balanced(update: LowRank) -> Factors:
    """Factor Δ = U S Vᵀ as (U √S) (√S Vᵀ): two factors of similar size, so that 16 bits lose little of either.

    They are [d_out, r] and [r, d_in], float64; r is the rank of Δ, at least 1.
    """
    # The SVD of a thin product is that of an r × r matrix between two orthonormal ones.
    q, inner = torch.linalg.qr(double(update.left))
    p, outer = torch.linalg.qr(double(update.right).T)
    u, s, vh = torch.linalg.svd(inner @ outer.T)
    rank = max(1, int((s > s.max() * 1e-12).sum()))
    root = s[:rank].sqrt()
    return (q @ u[:, :rank]) * root, root[:, None] * (vh[:rank] @ p.T)
