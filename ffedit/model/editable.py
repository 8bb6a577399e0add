"""A causal decoder whose feed-forward memories have been found: the object that all of ffedit works on.

`ffedit.loading.verify` makes one from a transformers model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ffedit.errors import ModelError
from ffedit.model import offload
from ffedit.model.edit_history import History
from ffedit.model.feed_forward import FeedForward
from ffedit.model.hooks import eval_mode
from ffedit.model.memory import Memories
from ffedit.model.roles import ATTENTION_ROLES
from ffedit.model.tokenization import Encoded, encode


@dataclass(eq=False)
class FingerprintCache:
    """Cache of what the fingerprint has read of a model, so that it reads it once (`ffedit.model.fingerprint`).

    Attributes:
        totals: by name, a weight, its state when it was read, and the sum of its entries then.
        vocabulary: a tokenizer, the number of its tokens, and its vocabulary as JSON then.
    """

    totals: dict[str, tuple[Tensor, tuple[int, int, bytes], int]] = field(default_factory=dict)
    vocabulary: tuple[PreTrainedTokenizerBase, int, bytes] | None = None


@dataclass(eq=False)
class Editable:
    """Causal language model whose memories have been found and verified.

    Attributes:
        model: the transformers model.
        tokenizer: its tokenizer.
        name: a hub id, a folder, or the name it was loaded by.
        layers: the decoder's blocks, in order.
        feed_forward: the memories of each layer as one.
        attention: the output projection of each layer's attention; empty where it is not recognised.
        embedding: the module that turns ids into vectors.
        unembedding: the module that turns states into logits.
        norm: path of the module that feeds the unembedding.
        layers_return_tuples: whether a block returns a tuple that begins with the hidden state.
        resumable: whether the model can be rerun from a position with a cache; if not, whole rows are rerun.
        ragged: whether each row of a batch can be rerun from its own position.
        probe_error: max |W k + b - observed output| over all layers, relative to the outputs' scale.
        history: the edits that are in the weights, and the originals of what they changed.
        chat: whether prompts are put into the tokenizer's chat template (`ffedit.model.chat`).
        source: the file that its checkpoint was converted from, plain JSON (`loading.gguf.source_of`), or None.
        hashed: what the fingerprint has read already.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    layers: list[nn.Module]
    feed_forward: list[FeedForward]
    attention: list[nn.Module]
    embedding: nn.Module
    unembedding: nn.Module
    norm: str = ""
    layers_return_tuples: bool = False
    resumable: bool = True
    ragged: bool = False
    probe_error: float = 0.0
    history: History = field(default_factory=History)
    chat: bool = False
    source: dict[str, Any] | None = None
    hashed: FingerprintCache = field(default_factory=FingerprintCache, repr=False)

    @property
    def device(self) -> torch.device:
        """Device of the token ids."""
        return offload.device_of(self.embedding)

    def run(self, **given: Any) -> Any:
        """Run the model on `given`, in evaluation mode whatever mode its modules are in."""
        with eval_mode(self.model):
            return self.model(**given)

    @cached_property
    def memories(self) -> Memories:
        """Value matrices, by `Address`, or by layer number where a layer has only one."""
        return Memories([part for layer in self.feed_forward for part in layer.parts])

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.feed_forward[0].shape[0]

    @property
    def last_feed_forward(self) -> nn.Module | None:
        """Module of the last feed-forward layer, norms outside; None where it is no module of its own (OPT)."""
        last = self.feed_forward[-1]
        if last.mixture is not None:
            return last.module
        module = self.model.get_submodule(last.parts[0].name.rsplit(".", 1)[0])
        return None if module is self.layers[-1] else module

    def outputs_of(self, part: str) -> list[nn.Module]:
        """Return the modules whose output is that of the "feed_forward" or "attention" part, layer by layer.

        Raises:
            ModelError: the attention's output projections were not recognised.
        """
        if part == "attention":
            if not self.attention:
                raise ModelError(
                    f"{self.name}: the attention's output projection was not recognised (one module called "
                    f"{'/'.join(ATTENTION_ROLES)} in each layer was expected); trace states or feed-forward outputs"
                )
            return self.attention
        return [layer.module for layer in self.feed_forward]

    @property
    def ends(self) -> set[int]:
        """Token ids that end the model's output: the text, or its turn in a chat."""
        settings = self.model.generation_config
        found = getattr(settings, "eos_token_id", None)
        ids = found if isinstance(found, list) else [found]
        return {int(i) for i in (*ids, self.tokenizer.eos_token_id) if i is not None}

    def encode(
        self, prompt: str, answer: str = "", span: tuple[int, int] | None = None, max_tokens: int | None = None
    ) -> Encoded:
        """Encode a prompt and its answer as `tokenization.encode` does; in a chat, inside its template."""
        return encode(self.tokenizer, prompt, answer, span, max_tokens, self.chat)

    @property
    def max_tokens(self) -> int:
        """Longest input that the model takes."""
        config: Any = self.model.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or 2048)
