"""A stack of layers to inspect: a decoder, an encoder, or one half of an encoder–decoder.

The paper that this project is based on (Geva et al. 2021, arXiv 2012.14913) inspects causal decoders and asks whether
the same holds for encoders and for translation. The analyses need the same of all of them, defined here: the
memories in order, what each layer computed in a pass, and how a vector of the residual stream is read as logits.

    before + added = total        added: the feed-forward output, behind a norm of its own where it has one (Gemma 2)
    after = norm(total)           where the block ends in a norm (BERT, BART); otherwise after = total
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions

from ffedit.errors import ModelError
from ffedit.model import offload
from ffedit.model.editable import Editable
from ffedit.model.experts import Routed
from ffedit.model.feed_forward import FeedForward
from ffedit.model.hooks import capture, eval_mode, replace_input, skipped, watched
from ffedit.model.memory import KeyValueMemory
from ffedit.model.residual_add import ResidualAdd, find_residual_adds


@dataclass(frozen=True, eq=False)
class Seen:
    """Activations of one layer in a pass over n rows of t tokens.

    Attributes:
        layer: counted from 0 at the embedding's side.
        key: m, the memory coefficients that the value matrix received, [n, t, d_ff]; of a mixture, those of all its
            experts joined, each scaled by its router's weight.
        output: of the value matrix or the mixture, bias included, [n, t, d_model].
        added: what the block adds to the residual stream for it, [n, t, d_model].
        total: the residual stream with it, before a norm in which the block may end, [n, t, d_model].
        after: the residual stream that leaves the block, [n, t, d_model].
        routed: the router's choice for the n · t tokens of a mixture; None of a dense layer.
    """

    layer: int
    key: Tensor
    output: Tensor
    added: Tensor
    total: Tensor
    after: Tensor
    routed: Routed | None = None

    @property
    def before(self) -> Tensor:
        """Residual stream without the feed-forward layer's part (with the attention's), [n, t, d_model]."""
        return (self.total.float() - self.added.float()).to(self.total.dtype)


@dataclass(eq=False)
class Stack:
    """Layers with their memories, in order, and the path from their output to logits.

    Attributes:
        name: "decoder" or "encoder".
        model: the whole model.
        tokenizer: its tokenizer.
        layers: the blocks.
        feed_forward: the feed-forward memory of each; of a mixture, the union of its experts'.
        norm: the norm of the residual stream behind the last layer, where there is one.
        max_tokens: longest input.
        entries: number of entries of the tuple that a block returns; 0 where it returns a bare tensor.
        called: the model's name in messages.
        editable: the model as a causal decoder; None where it is none.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    layers: list[nn.Module]
    feed_forward: list[FeedForward]
    norm: nn.Module | None
    max_tokens: int
    entries: int = 0
    called: str = "model"
    editable: Editable | None = None

    @classmethod
    def of(cls, editable: Editable | Stack) -> Stack:
        """Return the stack of a causal decoder; a Stack is returned as it is."""
        if isinstance(editable, Stack):
            return editable
        return cls(
            "decoder",
            editable.model,
            editable.tokenizer,
            editable.layers,
            editable.feed_forward,
            editable.model.get_submodule(editable.norm) if editable.norm else None,
            editable.max_tokens,
            2 if editable.layers_return_tuples else 0,
            editable.name,
            editable,
        )

    @property
    def memories(self) -> list[KeyValueMemory]:
        """All value matrices, in order: one of a dense layer, one for each expert of a mixture."""
        return [part for layer in self.feed_forward for part in layer.parts]

    @property
    def causal(self) -> bool:
        """True if a position depends only on those before it: not in an encoder, nor in a decoder with an encoder."""
        return self.name == "decoder" and not self.model.config.is_encoder_decoder

    @property
    def device(self) -> torch.device:
        """Device of the token ids."""
        return offload.device_of(self.model.get_input_embeddings())

    @property
    def unembedding(self) -> Tensor:
        """Unembedding matrix, which reads states as logits, [vocabulary, d_model]."""
        return offload.fetched(self._head())

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
    ) -> Any:
        """Run the pass that contains this stack.

        Args:
            ids: token ids [n, t] of this stack.
            mask: 1 where a token counts, [n, t]; not needed where all do, nor for padding right of a causal row.
            source: input of the encoder when this is the decoder of a pair, [n, s]; `ids` themselves if not given.
            source_mask: 1 where a token of it counts, [n, s]; `mask` where `source` is not given.

        Returns:
            The model's output; of the encoder of a pair, the encoder's.
        """
        with eval_mode(self.model):
            return self._forward(ids, mask, source, source_mask)

    def _forward(self, ids: Tensor, mask: Tensor | None, source: Tensor | None, source_mask: Tensor | None) -> Any:
        ids = ids.to(self.device)
        mask = mask if mask is None else mask.to(ids.device)
        if not self.model.config.is_encoder_decoder:
            cache = {"use_cache": False} if self.name == "decoder" else {}
            return self.model(input_ids=ids, attention_mask=mask, **cache)
        if self.name == "encoder":
            return self.model.get_encoder()(input_ids=ids, attention_mask=mask)
        source, source_mask = (ids, mask) if source is None else (source.to(ids.device), source_mask)
        return self.model(
            input_ids=source,
            attention_mask=source_mask if source_mask is None else source_mask.to(ids.device),
            decoder_input_ids=ids,
            decoder_attention_mask=mask,
            use_cache=False,
        )

    @torch.no_grad()
    def stream(self, ids: Tensor, see: Callable[[Seen], None], *given: Tensor | None) -> None:
        """Run token ids [n, t] and pass each layer's `Seen` to `see` once it is done; nothing is kept or unembedded.

        Args:
            ids: as of `forward`.
            see: called with each layer in turn.
            given: mask, source and its mask, as of `forward`.

        Raises:
            ModelError: it was not recognised how a block adds its feed-forward output to the residual stream.
        """
        shape = (*ids.shape, -1)  # some models (OPT) flatten rows and tokens ahead of the feed-forward layer
        values, residual_adds = (
            {one.layer: one.module for one in self.feed_forward},
            dict(enumerate(self.residual_adds)),
        )
        routed: dict[int, Routed] = {}
        with ExitStack() as stack:
            keys = [stack.enter_context(one.keys()) for one in self.feed_forward]
            for one in self.feed_forward:
                if one.mixture is not None:
                    note = partial(routed.__setitem__, one.layer)
                    stack.enter_context(one.mixture.watched(routes=note))
            outputs = stack.enter_context(capture(values))
            added = stack.enter_context(
                capture({i: j.added for i, j in residual_adds.items() if j.added is not values[i]})
            )
            normed = {i: joint.norm for i, joint in residual_adds.items() if joint.norm is not None}
            totals = stack.enter_context(capture(normed, inputs=True))

            def show(layer: int, after: Tensor) -> None:
                output, after = outputs.pop(layer).reshape(shape), after.clone().reshape(shape)
                part = added.pop(layer).reshape(shape) if layer in added else output
                part = part if residual_adds[layer].factor == 1 else part * residual_adds[layer].factor
                total = totals.pop(layer).reshape(shape) if layer in totals else after
                key = keys[layer]().reshape(shape)
                see(Seen(layer, key, output, part, total, after, routed.pop(layer, None)))

            for layer, module in enumerate(self.layers):
                stack.enter_context(watched(module, partial(show, layer)))
            stack.enter_context(self._unread())
            self.forward(ids, *given)

    def run(self, ids: Tensor, mask: Tensor | None = None, source: Tensor | None = None) -> list[Seen]:
        """Run token ids [n, t] and return each layer's `Seen`; arguments and errors as of `stream`."""
        seen: list[Seen] = []
        self.stream(ids, seen.append, mask, source)
        return seen

    @torch.no_grad()
    def run_to(self, layer: int, ids: Tensor, *given: Tensor | None) -> None:
        """Run token ids [n, t] through layers 0 … `layer` and no further, for hooks to read; `given` as above."""
        first = self.feed_forward[0]
        nothing = torch.zeros(*ids.shape, first.shape[0], dtype=first.dtype, device=self.device)
        with self._skipping(self.layers[layer + 1 :], nothing), self._unread():
            self.forward(ids, *given)

    @torch.no_grad()
    def read(self, vectors: Tensor) -> Tensor:
        """Read vectors of the residual stream as logits, by the model's own path behind the last layer.

        Of an encoder without a decoder this is its masked-language head. The encoder of a pair is never unembedded by
        the model: behind its own final norm it is read as the decoder's last state would be.

        Args:
            vectors: [n, d_model].

        Returns:
            Logits [n, vocabulary], float32.

        Raises:
            ModelError: the model has no unembedding.
        """
        states = vectors.to(self.device, self.unembedding.dtype)[:, None]
        ids = torch.zeros(len(states), 1, dtype=torch.long, device=self.device)
        given: dict[str, Any] = {"input_ids": ids}
        with ExitStack() as stack:
            if self.model.config.is_encoder_decoder:
                given = {"encoder_outputs": BaseModelOutput(last_hidden_state=states), "decoder_input_ids": ids}
            if self.model.config.is_encoder_decoder and self.name == "encoder":
                final = states if self.norm is None else self.norm(states)
                read = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=final)
                stack.enter_context(skipped(self.model.get_decoder(), read, False))
            else:
                stack.enter_context(self._skipping(self.layers, states))
            if self.name == "decoder":
                given["use_cache"] = False
            stack.enter_context(eval_mode(self.model))
            logits: Tensor = self.model(**given).logits
        return logits[:, 0].float()

    @cached_property
    def residual_adds(self) -> list[ResidualAdd]:
        """Addition of each block's feed-forward output to the residual stream; found in a probe run on first use."""
        return find_residual_adds(self.layers, self.feed_forward, self.probe)

    def probe(self) -> None:
        """Run a few fixed token ids that any vocabulary has."""
        size = int(self.model.config.get_text_config().vocab_size)
        with torch.no_grad():
            self.forward((torch.arange(8) * 7919 + 11)[None, :] % size)

    @contextmanager
    def _skipping(self, layers: Sequence[nn.Module], states: Tensor) -> Iterator[None]:
        """Make each of `layers` return `states` instead of running."""
        returned = (states, *[None] * (self.entries - 1)) if self.entries else states
        with ExitStack() as stack:
            for layer in layers:
                stack.enter_context(skipped(layer, returned, False))
            yield

    def _unread(self) -> AbstractContextManager[None]:
        """Unembed one state only, in a pass whose logits are not read."""
        unembedding = self.model.get_output_embeddings()
        return nullcontext() if unembedding is None else replace_input(unembedding, lambda hidden: hidden[:1, :1])

    def _head(self) -> nn.Module:
        head: nn.Module | None = self.model.get_output_embeddings()
        if head is None:
            raise ModelError(
                f"{type(self.model).__name__} has no unembedding, so its states read as no tokens; load the model with "
                "its language-modelling head"
            )
        return head
