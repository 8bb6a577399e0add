"""The names of a parameter in the files of a checkpoint.

transformers may hold in one parameter what its checkpoints store separately (the matrices of all experts), or under
another name, and converts it back when it saves. This module uses the same conversion.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def saved(model: PreTrainedModel, name: str, parameter: Tensor) -> dict[str, Tensor]:
    """Return a parameter of `model` as its checkpoint stores it: tensors by their names in the files."""
    found: dict[str, Tensor] = revert_weight_conversion(model, {name: parameter})
    return found


def experts_apart(model: PreTrainedModel, name: str, count: int) -> list[str]:
    """Return the names in files of the matrices of a parameter of `count` experts; empty where they are one tensor."""
    marked = torch.arange(float(count))[:, None, None]
    found = saved(model, name, marked)
    if len(found) != count or any(tensor.numel() != 1 for tensor in found.values()):
        return []
    return sorted(found, key=lambda one: float(found[one]))
