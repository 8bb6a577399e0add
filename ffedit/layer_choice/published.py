"""Layer to edit unless another is asked for: the one published for the model, or else a quarter of its depth.

A row of published layers applies to every checkpoint of its shape. ROME writes one layer; MEMIT and the methods derived
from it a range that ends at the layer where v* is chosen. They lie between .15 and .35 of the depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from ffedit.facts.text import counted
from ffedit.model.editable import Editable

# Where no layer was published: the layer's share of the depth, and the least number of layers after it.
SHARE, BEHIND = 1 / 4, 3


@dataclass(frozen=True)
class Published:
    """Layers that were published for a model."""

    name: str
    model_type: str  # as in its config, like `depth` and `d_model`
    depth: int
    d_model: int
    rome: int  # ROME's layer
    memit: tuple[int, int] | None  # first and last layer of MEMIT's range; None if none was published
    source: str

    def layer(self, method: str) -> int:
        """Return the layer for a method: ROME's, or the end of MEMIT's range."""
        return self.rome if method == "rome" or self.memit is None else self.memit[1]


# Sources are files of public repositories, with the paper they belong to.
PUBLISHED = (
    Published("GPT-2 medium", "gpt2", 24, 1024, 8, None, "zjunlp/EasyEdit hparams/ROME/gpt2-medium.json"),
    Published("GPT-2 large", "gpt2", 36, 1280, 12, None, "zjunlp/EasyEdit hparams/ROME/gpt2-large.json"),
    Published("GPT-2 XL", "gpt2", 48, 1600, 17, (13, 17), "arXiv 2202.05262 and 2210.07229: kmeng01/rome "
              "hparams/ROME/gpt2-xl.json, jianghoucheng/AlphaEdit hparams/MEMIT/gpt2-xl.json"),
    Published("GPT-J", "gptj", 28, 4096, 5, (3, 8), "arXiv 2202.05262 and 2210.07229: kmeng01/rome hparams/ROME, "
              "kmeng01/memit hparams/MEMIT, EleutherAI_gpt-j-6B.json"),
    Published("GPT-NeoX-20B", "gpt_neox", 44, 6144, 15, (6, 10), "arXiv 2210.07229: kmeng01/memit hparams/ROME, "
              "hparams/MEMIT/EleutherAI_gpt-neox-20b.json"),
    Published("Llama 2 7B and Llama 3 8B", "llama", 32, 4096, 5, (4, 8), "arXiv 2410.02355: jianghoucheng/AlphaEdit "
              "hparams/ROME, hparams/MEMIT/Llama3-8B.json; zjunlp/EasyEdit hparams/ROME, hparams/MEMIT/llama-7b.yaml"),
    Published("Mistral 7B", "mistral", 32, 4096, 5, (4, 8), "zjunlp/EasyEdit hparams/ROME, "
              "hparams/MEMIT/mistral-7b.yaml"),
    Published("Qwen 2 and 2.5 7B", "qwen2", 28, 3584, 5, (4, 8), "zjunlp/EasyEdit hparams/ROME, "
              "hparams/MEMIT/qwen2.5-7b.yaml"),
)  # fmt: skip


def published(config: Any) -> Published | None:
    """Return the row for a model with this config, or None."""
    shape = tuple(getattr(config, name, None) for name in ("model_type", "num_hidden_layers", "hidden_size"))
    return next((row for row in PUBLISHED if (row.model_type, row.depth, row.d_model) == shape), None)


def usual_layer(depth: int) -> int:
    """Return the layer at a quarter of the `depth`, rounded up, or a lower one that has `BEHIND` after it (at least 0).

    Attention in later layers carries what is written at the subject to the prompt's end, and few layers carry less:
    models of three and four layers recall facts at layer 0, and are edited best there.
    """
    return min(ceil(SHARE * depth), max(0, depth - 1 - BEHIND))


@dataclass(frozen=True)
class AutoLayer:
    """Layer that `auto` takes in a model of `depth` layers, and the published row that names it, if there is one."""

    layer: int
    depth: int
    row: Published | None = None

    @property
    def by(self) -> Literal["published", "usual"]:
        """Return the rule that gave the layer."""
        return "usual" if self.row is None else "published"

    @property
    def why(self) -> str:
        """Return the rule in words."""
        if self.row is None:
            return f"the usual quarter of {counted(self.depth, 'layer')}"
        return f"published for {self.row.name} ({self.row.source})"


def auto_layer(editable: Editable, method: str = "memit") -> AutoLayer:
    """Return the layer to edit in this model, by its config alone: nothing is run, and nothing is read from a cache."""
    depth, row = len(editable.layers), published(editable.model.config.get_text_config())
    return AutoLayer(usual_layer(depth) if row is None else row.layer(method), depth, row)
