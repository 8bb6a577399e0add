"""Tiny models that see pictures, too: a text decoder of another family beside a vision tower, and what ffedit does.

The tower never runs here: it is what a checkpoint holds besides, and must keep. docs/families.md has a table of this,
which `python tests/helpers/families.py` writes and tests hold against what is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from making import check_here, same, weights
from storing import BARE, missed_in_prompt, write
from torch import Tensor
from writing import FACT

import ffedit
from ffedit import FFEditError
from ffedit.exporter.checkpoint import file_name
from ffedit.model.editable import Editable

# No token of `zoo.bytes_bpe` and no probe is one of these.
IMAGE, VIDEO, START, END, VOCAB = 420, 421, 422, 423, 424
LAYER = 1
IDS = torch.arange(12)[None] * 7 % 97
_TEXT = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 48, "max_position_embeddings": 64, "head_dim": 8, "vocab_size": VOCAB},
    **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1},
}
_TOWER = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 16, "patch_size": 8},
}
_QWEN = {"depth": 1, "num_heads": 2, "hidden_size": 32, "patch_size": 8}
_QWEN_3 = {**_QWEN, "intermediate_size": 24, "out_hidden_size": 32, "num_position_embeddings": 16}
_TURNED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_SEEN = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_MARKED = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END}
_LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
_EXPERTS = {
    **{"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "attention_chunk_size": 32},
    **{"intermediate_size": 24, "intermediate_size_mlp": 48},
}


@dataclass(frozen=True)
class Shape:
    """Configuration of one class: of its text decoder and its vision tower, and the other arguments."""

    config: Any
    text: dict[str, Any]
    vision: dict[str, Any]
    arguments: dict[str, Any]
    parameters: int


_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
_CLIP = {**_TOWER, "model_type": "clip_vision_model"}
_QWEN_25 = {**_QWEN, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "fullatt_block_indexes": [0]}
_LLAMA_4 = {**_TOWER, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
_ONE = {"image_token_id": IMAGE}
_ROUTED = {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
_GEMMA_4 = {
    **{"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
    **{"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 16},
    "global_head_dim": 8,
}
_GEMMA_4_TOWER = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "head_dim": 8, "patch_size": 8},
}
SHAPES = {
    "gemma3": Shape(hf.Gemma3Config, {"sliding_window": 16}, _SIGLIP, {**_MARKED, "mm_tokens_per_image": 4}, 42_744),
    "qwen2_vl": Shape(hf.Qwen2VLConfig, _TURNED, {**_QWEN, "embed_dim": 16}, _SEEN, 66_288),
    "qwen2_5_vl": Shape(hf.Qwen2_5_VLConfig, _TURNED, _QWEN_25, _SEEN, 65_328),
    "qwen3_vl": Shape(hf.Qwen3VLConfig, _TURNED, {**_QWEN_3, "deepstack_visual_indexes": [0]}, _SEEN, 110_824),
    "qwen3_5": Shape(hf.Qwen3_5Config, _LINEAR, _QWEN_3, _SEEN, 94_024),
    "llava": Shape(
        hf.LlavaConfig, {"model_type": "llama"}, {**_TOWER, "model_type": "clip_vision_model"}, _ONE, 57_192
    ),
    "mistral3": Shape(
        hf.Mistral3Config, {"model_type": "mistral"}, {**_TOWER, "model_type": "pixtral", "head_dim": 8}, _ONE, 44_704
    ),
    "llama4": Shape(hf.Llama4Config, _EXPERTS, _LLAMA_4, _MARKED, 77_864),
    "smolvlm": Shape(hf.SmolVLMConfig, {"model_type": "llama"}, _TOWER, {**_ONE, "scale_factor": 2}, 57_592),
    "paligemma": Shape(
        hf.PaliGemmaConfig, {"model_type": "gemma"}, _SIGLIP, {**_ONE, "projection_dim": 32, "hidden_size": 32}, 42_520
    ),
    "internvl": Shape(
        hf.InternVLConfig,
        {"model_type": "qwen2"},
        {**_TOWER, "image_size": [16, 16], "patch_size": [8, 8]},
        _ONE,
        45_416,
    ),
    "qwen3_vl_moe": Shape(
        hf.Qwen3VLMoeConfig, {**_TURNED, **_ROUTED}, {**_QWEN_3, "deepstack_visual_indexes": [0]}, _SEEN, 125_032
    ),
    "qwen3_5_moe": Shape(
        hf.Qwen3_5MoeConfig, {**_LINEAR, **_ROUTED, "shared_expert_intermediate_size": 16}, _QWEN_3, _SEEN, 112_936
    ),
    "gemma4": Shape(
        hf.Gemma4Config,
        _GEMMA_4,
        _GEMMA_4_TOWER,
        {"image_token_id": IMAGE, "boi_token_id": START, "eoi_token_id": END, "audio_config": None},
        383_176,
    ),
    "llava_onevision": Shape(
        hf.LlavaOnevisionConfig, {"model_type": "qwen2"}, _SIGLIP, {**_ONE, "image_grid_pinpoints": [[16, 16]]}, 57_368
    ),
}
HEAD = ("class", "loaded as", "value matrix in memory", "in the files", "works")
ABOUT = """
## Checkpoints with a vision tower

Their text decoder is one of the families above or similar. It is edited, and the whole checkpoint is exported under
the tensor names of its files, which the conversion of transformers maps to the names in memory. **works**:
*everything* means all of the following. The real forward pass gives the value of a fact that ROME wrote. In the export
all other tensors have the base's bytes, the vision tower included, and the class in the column *loaded as* opens it
with the logits of the edited model. Undoing the export gives the base, bit for bit. PEFT gives the same logits with
the adapter in that class. If this version of transformers cannot run the whole class, its text decoder is loaded
alone. A class in which a token sees later ones is refused, because the end of the prompt would then change the key at
the subject.

"""
_PLACE = TemporaryDirectory(prefix="ffedit-pictures-")


def model(kind: str) -> Any:
    """A random model in which every bias and norm weight counts, its vision tower included."""
    shape = SHAPES[kind]
    torch.manual_seed(0)
    config = shape.config(text_config={**_TEXT, **shape.text}, vision_config=shape.vision, **shape.arguments)
    made = hf.AutoModelForMultimodalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter)) if parameter.ndim == 1 else parameter.mul_(15.0)
    assert made.num_parameters() == shape.parameters, f"{kind}: {made.num_parameters()} parameters"
    return made


def saved(kind: str, folder: Path) -> Path:
    """A checkpoint of several shards."""
    model(kind).save_pretrained(folder, max_shard_size="60KB")
    zoo.bytes_bpe().save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Case:
    """What became of an edit of one class.

    Attributes:
        whole: the class that the checkpoint was saved from.
        refused: why it is not edited; all else is None then.
        editable: the model as ffedit loads it, unedited.
        name: of the edited matrix, in the files; of a mixture, that of its experts.
        others: whether every other tensor of the exported checkpoint has the base's bytes.
        reopened: whether the class that ffedit loads gives the logits of the edited model.
        undone: whether undoing the edit in the checkpoint gives the base's tensors, bit for bit.
        missed: how much of what ROME asked for is missed in a real forward pass with the edit applied.
        adapter: why PEFT could not put the edit on that class; empty: it did, with the same logits.
    """

    whole: str
    refused: str
    editable: Editable | None = None
    name: str = ""
    others: bool = False
    reopened: bool = False
    undone: bool = False
    missed: float = math.inf
    adapter: str = ""


@cache
def case(kind: str) -> Case:
    """One class's, made once."""
    place = Path(_PLACE.name) / kind
    base, whole = saved(kind, place / "base"), type(model(kind)).__name__
    try:
        editable = ffedit.load(base)
    except FFEditError as error:
        return Case(whole, str(error))
    edit = write(editable, [FACT], "rome", [LAYER], **BARE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ffedit.exporter.exporting.check_fresh", check_here)
        ffedit.export(base, edit, place / "edited")
        ffedit.undo(place / "edited", place / "undone")
        try:
            ffedit.export(base, edit, place / "adapter", format="adapter")
            adapter = ""
        except FFEditError as error:
            adapter = str(error)
    before, after = weights(base), weights(place / "edited")
    names = {
        file_name(before, memory.parameter.partition("[")[0], memory.saved_as.partition("[")[0]) or ""
        for memory in (editable.memories[at] for at in edit.updates)
    }
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    with edit.applied(editable):
        expected = _logits(editable.model)
    reopened = _logits(type(editable.model).from_pretrained(place / "edited").eval())
    return Case(
        whole,
        "",
        editable,
        min(names),
        before.keys() == after.keys() and changed == names,
        torch.equal(expected, reopened),
        same(weights(place / "undone"), before),
        missed_in_prompt(editable, edit, LAYER),
        adapter,
    )


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=IDS).logits
    return logits


def works(kind: str) -> str:
    """What works, in words."""
    if (found := case(kind)).editable is None:
        return f"no: it {found.refused.partition(found.whole)[2].partition(';')[0].strip()}"
    parts = {
        "ROME": found.missed < 1e-4,
        "an export": found.others,
        "reopening": found.reopened,
        "undo": found.undone,
        "an adapter": not found.adapter,
    }
    missing = [name for name, there in parts.items() if not there]
    return f"all but {', '.join(missing)}" if missing else "everything"


def row(kind: str) -> tuple[str, ...]:
    """One line of the table."""
    found = case(kind)
    if found.editable is None:
        return (found.whole, "", "", "", works(kind))
    memory = next(memory for at, memory in found.editable.memories.items() if at.layer == LAYER)
    inside = memory.parameter.partition("[")[0]
    return (found.whole, type(found.editable.model).__name__, f"`{inside}`", f"`{found.name}`", works(kind))


def section() -> str:
    """The section of docs/families.md."""
    lines = [HEAD, ("---",) * len(HEAD), *map(row, SHAPES)]
    return ABOUT + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
