"""A causal decoder whose memories can be read, traced and edited, with the history of its edits.

    before + added = total        added: the feed-forward output, behind a norm of its own where it has one (Gemma 2)
    after = norm(total)           where the block ends in a norm (GPT-1, OPT-350m); otherwise after = total

`ffedit.loading` makes an `Editable` from a transformers model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from ffedit.errors import ModelError
from ffedit.model import storage
from ffedit.model.discover import ResidualAdd, find_residual_adds
from ffedit.model.experts import Routed
from ffedit.model.feed_forward import FeedForward
from ffedit.model.hooks import capture, eval_mode, replace_forward, replace_input, watched
from ffedit.model.memory import Address, KeyValueMemory, Memories
from ffedit.model.products import fast_products
from ffedit.model.roles import ATTENTION_ROLES
from ffedit.model.tokenization import Encoded, encode, special_tokens
from ffedit.notebook import Displayed

# Added tokens that stand for no text, by their form: <start_of_image>, <|file_sep|>. Not all tokenizers mark them as
# special, GGUF files least of all; <table> and runs of blanks are text.
MARKUP = re.compile(r"<[^<>\s]*[_|｜][^<>\s]*>")


@dataclass(frozen=True, eq=False)
class Seen:
    """Activations of one layer in a pass over n rows of t tokens."""

    layer: int  # counted from 0 at the embedding's side
    # m, the memory coefficients that the value matrix received, [n, t, d_ff]; for a mixture, those of all its experts
    # concatenated, each scaled by the router's weight
    key: Tensor
    output: Tensor  # output of the value matrix or the mixture, bias included, [n, t, d_model]
    added: Tensor  # the same as it is added to the residual stream, normed and scaled, [n, t, d_model]
    total: Tensor  # the residual stream after this addition, before a norm that may end the block, [n, t, d_model]
    after: Tensor  # the residual stream that leaves the block, [n, t, d_model]
    routed: Routed | None = None  # the router's choice for the n · t tokens of a mixture; None for a dense layer

    @property
    def before(self) -> Tensor:
        """Residual stream without the feed-forward layer's output (with the attention's), [n, t, d_model]."""
        return (self.total.float() - self.added.float()).to(self.total.dtype)


@dataclass(eq=False)
class History:
    """Edits (`ffedit.editor.Edit`) in a model's weights and the original matrices, for undoing without subtraction.

    W + Δ − Δ is not W in floating point. So undoing rebuilds a matrix: the original plus the edits that remain, in
    order, each rounded once. The weights are then bit for bit those of a model that the undone edit never touched.

    Edits that came with a checkpoint without their originals are permanent (`lasting`): part of what later edits count
    as original.
    """

    # fingerprint of the weights before the oldest of `edits`; None while there are none; "" where they came with a
    # checkpoint, until `ffedit.editor.edit.base_of` computes it
    base: str | None = None
    edits: dict[str, Any] = field(default_factory=dict)  # edits that can be undone, by fingerprint, in order
    # the matrices before these edits changed them, [d_model, d_ff], in the weights' dtype
    originals: dict[Address, Tensor] = field(default_factory=dict)
    # edits that were in the weights before these and cannot be undone, by fingerprint, in order
    lasting: dict[str, Any] = field(default_factory=dict)

    @property
    def known(self) -> dict[str, Any]:
        """All edits in the weights, by fingerprint, the oldest first."""
        return self.lasting | self.edits

    def apply_(self, memories: Mapping[Address, KeyValueMemory], name: str, edit: Any, weights: str) -> None:
        """Write `edit`, called `name`, into weights of fingerprint `weights`; if that fails, restore them."""
        self.originals |= {at: memories[at].value.clone() for at in edit.updates if at not in self.originals}
        self.base = weights if self.base is None else self.base
        self.edits[name] = edit
        try:
            for at, delta in edit.updates.items():
                memories[at].write_(delta)
        except BaseException:
            self.undo_(memories, name)
            raise

    def undo_(self, memories: Mapping[Address, KeyValueMemory], name: str) -> None:
        """Rebuild the matrices that the edit `name` changed: the originals with the other edits in their order."""
        others = [edit for other, edit in self.edits.items() if other != name]
        touched = self.edits[name].updates
        for at in touched:
            memories[at].set_(self.originals[at])
            for edit in others:
                if at in edit.updates:
                    memories[at].write_(edit.updates[at])
        # Deleted only now: if an interrupt came before, undo can be called again.
        del self.edits[name]
        for at in touched:
            if not any(at in edit.updates for edit in others):
                del self.originals[at]
        if not self.edits:
            self.base = None


@dataclass(eq=False)
class Editable(Displayed):
    """Causal language model whose memories have been found and verified.

    Attributes:
        model: the whole transformers model.
        tokenizer: its tokenizer.
        name: its name: a hub id, a folder, or what it was loaded by.
        layers: the blocks, in order.
        feed_forward: the memories of each layer as one.
        norm: path of the norm of the residual stream behind the last layer; "" where there is none.
        layer_outputs: number of entries of the tuple that a block returns; 0 where it returns a bare tensor.
        max_tokens: longest input.
        attention: the output projection of each layer's attention; empty where it is not recognised.
        resumable: whether the model can be rerun from a position with a cache; if not, whole rows are rerun.
        ragged: whether each row of a batch can be rerun from its own position.
        packed: the most tokens of a text that can share a row with others, as far as lengths were tried
            (`inference.contexts`); 0 where none can.
        windowed: whether a longer text was tried and could not share a row.
        probe_error: max |W k + b - observed output| over all layers, relative to the outputs' scale.
        history: the edits in the weights, and the original matrices.
        chat: whether prompts are put into the tokenizer's chat template (`ffedit.model.tokenization`).
        source: description of the GGUF file that it was read from, plain JSON (`loading.gguf.source_of`), or None.
        as_read: the fingerprint of the weights as they are in that file; "" where there is none.
        unpacked: the quantisation of its files ("fp8"), where transformers unpacked all value matrices; else "".
        auto_dtype: whether the user chose no dtype, so that passes that only average may be computed in another.
        averaging: the dtype of such passes, once it is decided (`inference.precision`).
        hashed: cache of `ffedit.model.fingerprint`, by name: the object that was read, its state then, and the result.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    layers: list[nn.Module]
    feed_forward: list[FeedForward] = field(default_factory=list)
    norm: str = ""
    layer_outputs: int = 0
    max_tokens: int = 2048
    attention: list[nn.Module] = field(default_factory=list)
    resumable: bool = True
    ragged: bool = False
    packed: int = 0
    windowed: bool = False
    probe_error: float = 0.0
    history: History = field(default_factory=History)
    chat: bool = False
    source: dict[str, Any] | None = None
    as_read: str = ""
    unpacked: str = ""
    auto_dtype: bool = False
    averaging: torch.dtype | None = None
    hashed: dict[str, tuple[Any, Any, Any]] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        widths = "/".join(f"{width:,}" for width in sorted({memory.d_ff for memory in self.memories.values()}))
        chat = ", in its chat template" if self.chat else ""
        edits = ", ".join(self.history.known) or "none"
        return (
            f"{type(self).__name__} {self.name}: {type(self.model).__name__}, {len(self.layers)} layers of {widths} "
            f"memories, d_model {self.d_model}, {self.device}{chat}\n  edits applied: {edits}"
        )

    @cached_property
    def memories(self) -> Memories:
        """Value matrices, by `Address`, or by layer number where a layer has only one."""
        return Memories([memory for layer in self.feed_forward for memory in layer.memories])

    @property
    def start_tokens(self) -> list[int]:
        """Token ids that a plain text begins with: those that the tokenizer puts in front of it, if any."""
        return special_tokens(self.tokenizer)[0]

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.feed_forward[0].shape[0]

    @property
    def embedding(self) -> nn.Module:
        """Module that turns ids into vectors."""
        return self.model.get_input_embeddings()

    @property
    def unembedding(self) -> nn.Module:
        """Module that turns states into logits."""
        head: nn.Module = self.model.get_output_embeddings()
        return head

    @property
    def vocabulary(self) -> int:
        """Number of logits, including those that pad the vocabulary."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def device(self) -> torch.device:
        """Device of the token ids."""
        return storage.device_of(self.embedding)

    def run(self, cache: Cache | None = None, **inputs: Any) -> Any:
        """Run the whole model in evaluation mode; `cache` holds the keys and values of earlier positions."""
        if cache is not None:  # earlier transformers call it `past_key_values`
            inputs["cache" if "cache" in signature(self.model.forward).parameters else "past_key_values"] = cache
        with eval_mode(self.model), fast_products(self.model):
            return self.model(**inputs)

    def forward(self, ids: Tensor) -> Any:
        """Run token ids [n, t] and return the model's output; padding right of a row needs no mask."""
        return self.run(input_ids=ids.to(self.device), use_cache=False)

    @torch.no_grad()
    def stream(self, ids: Tensor, see: Callable[[Seen], None]) -> None:
        """Run token ids [n, t] and pass each layer's `Seen` to `see` once it has run; nothing is kept or unembedded.

        Raises ModelError where it was not recognised how a block adds its feed-forward output to the residual stream.
        """
        shape = (*ids.shape, -1)  # some models (OPT) flatten rows and tokens ahead of the feed-forward layer
        values = {ff.layer: ff.module for ff in self.feed_forward}
        residual_adds = dict(enumerate(self.residual_adds))
        routed: dict[int, Routed] = {}
        with ExitStack() as stack:
            keys = [stack.enter_context(ff.keys()) for ff in self.feed_forward]
            for ff in self.feed_forward:
                if ff.mixture is not None:
                    stack.enter_context(ff.mixture.watched(routes=partial(routed.__setitem__, ff.layer)))
            outputs = stack.enter_context(capture(values))
            added = stack.enter_context(
                capture({i: add.added for i, add in residual_adds.items() if add.added is not values[i]})
            )
            normed = {i: add.norm for i, add in residual_adds.items() if add.norm is not None}
            totals = stack.enter_context(capture(normed, inputs=True))

            def show(layer: int, after: Tensor) -> None:
                output, after = outputs.pop(layer).reshape(shape), after.clone().reshape(shape)
                addend = added.pop(layer).reshape(shape) if layer in added else output
                addend = addend if residual_adds[layer].factor == 1 else addend * residual_adds[layer].factor
                total = totals.pop(layer).reshape(shape) if layer in totals else after
                key = keys[layer]().reshape(shape)
                see(Seen(layer, key, output, addend, total, after, routed.pop(layer, None)))

            for layer, module in enumerate(self.layers):
                stack.enter_context(watched(module, partial(show, layer)))
            stack.enter_context(self.without_logits())
            self.forward(ids)

    def activations(self, ids: Tensor) -> list[Seen]:
        """Run token ids [n, t] and return each layer's `Seen`, as `stream` does."""
        seen: list[Seen] = []
        self.stream(ids, seen.append)
        return seen

    def read(self, vectors: Tensor) -> Tensor:
        """Read vectors [n, d_model] as logits [n, vocabulary], float32, by the model's own path after its layers."""
        head: Any = self.unembedding  # offloaded or not, its weight has its dtype
        dtype = (storage.fetched(head) if storage.is_quantised(head) else head.weight).dtype
        return self.logits_of(vectors.to(self.device, dtype)).float()

    @torch.no_grad()
    def logits_of(self, states: Tensor) -> Tensor:
        """Return logits [n, vocabulary] of last-layer outputs [n, d_model]: the model's norm, unembedding, scaling."""
        with self.skipping(self.layers, states[:, None]):
            logits: Tensor = self.forward(torch.zeros(len(states), 1, dtype=torch.long)).logits
        return logits[:, 0]

    @cached_property
    def residual_adds(self) -> list[ResidualAdd]:
        """Addition of each block's feed-forward output to the residual stream; found on first use."""
        return find_residual_adds(self.layers, self.feed_forward, self.probe)

    def probe(self) -> None:
        """Run a few fixed token ids that any vocabulary has."""
        with torch.no_grad():
            self.forward(self.probe_ids())

    def probe_ids(self, count: int = 8) -> Tensor:
        """Return a few fixed token ids [1, count] that any vocabulary has."""
        size = self.vocabulary
        return (torch.arange(count) * 7919 + 11)[None, :] % size

    @contextmanager
    def skipping(self, layers: Sequence[nn.Module], states: Tensor) -> Iterator[None]:
        """Make each of `layers` return `states` instead of running."""
        returned = (states, *[None] * (self.layer_outputs - 1)) if self.layer_outputs else states
        with ExitStack() as stack:
            for layer in layers:
                stack.enter_context(replace_forward(layer, lambda *args, **kwargs: returned))
            yield

    def without_logits(self) -> AbstractContextManager[None]:
        """Unembed one state only in passes inside the block, since nothing reads their logits."""
        return replace_input(self.unembedding, lambda hidden: hidden[:1, :1])

    @property
    def last_feed_forward(self) -> nn.Module | None:
        """Module of the last feed-forward layer, without norms around it; None where it has no module (OPT)."""
        last = self.feed_forward[-1]
        if last.mixture is not None:
            return last.module
        module = self.model.get_submodule(last.memories[0].name.rsplit(".", 1)[0])
        return None if module is self.layers[-1] else module

    def outputs_of(self, part: str) -> list[nn.Module]:
        """Return the module of each layer that computes the output of a part, "feed_forward" or "attention"."""
        if part == "feed_forward":
            return [layer.module for layer in self.feed_forward]
        if not self.attention:
            raise ModelError(
                f"{self.name}: the attention's output projection was not recognised (one module called "
                f"{'/'.join(ATTENTION_ROLES)} in each layer was expected); trace states or feed-forward outputs"
            )
        return self.attention

    @property
    def ends(self) -> set[int]:
        """Token ids that end the model's output: the text, or its turn in a chat."""
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        ids = eos if isinstance(eos, list) else [eos]
        return {int(i) for i in (*ids, self.tokenizer.eos_token_id) if i is not None}

    @cached_property
    def special(self) -> set[int]:
        """Token ids that stand for no text: special tokens of the tokenizer, and added tokens that match `MARKUP`."""
        added = self.tokenizer.added_tokens_decoder
        tokens = added.items() if isinstance(added, Mapping) else ()  # Mistral's own tokenizer does not list them
        marked = {i for i, token in tokens if token.special or MARKUP.fullmatch(token.content)}
        return marked.union(self.tokenizer.all_special_ids)

    def encode(
        self, prompt: str, answer: str = "", span: tuple[int, int] | None = None, max_tokens: int | None = None
    ) -> Encoded:
        """Encode a prompt and its answer as `tokenization.encode` does; in a chat, inside its template."""
        return encode(self.tokenizer, prompt, answer, span, max_tokens, self.chat)


def check_model(model: object) -> None:
    """Raise ModelError for anything but a loaded model, such as a model's name."""
    ModelError.require(model, Editable, "a loaded model was expected; load it first: editable = ffedit.load(name)")
