"""One pass over a text that records every memory of every layer.

While the model runs, the values at each layer (`Stack.stream`: the coefficients m, the residual stream) are reduced at
once: to the triggers of all keys, a sample of positions with the residual stream there, and the counts of tokens and
pairs of tokens in the text. Nothing is kept per token but the token ids, which go to disk (`rows`); so memory does not
depend on the length of the text. The unembedding does not run.

Between two batches the state is consistent. It is written to the folder periodically and when the pass is interrupted;
the next pass with the same settings reads the text again as far as it was run, checks that it is the same, and
continues from there to the same result. Passes over different texts merge into the pass over all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffedit.errors import EditError
from ffedit.files.atomic import written
from ffedit.files.placing import delay_interrupt
from ffedit.files.resuming import differences, load_state, save_state
from ffedit.inference.batching import batches
from ffedit.inspector.keys import PAIRS, Frequencies, pair_hash
from ffedit.inspector.rows import CHUNK, WIDTH, Row, RowLayout, RowStore, chunks
from ffedit.inspector.triggers import Sample, Triggers, mixed, prefix_hashes
from ffedit.inspector.values import ACTIVE, effective_number
from ffedit.model import storage
from ffedit.model.editable import Seen, Stack
from ffedit.model.feed_forward import FeedForward
from ffedit.model.fingerprint import fingerprint
from ffedit.model.tokenization import pad
from ffedit.progress import Progress, silent

FILE = "pass.safetensors"
TOKENS_PER_BATCH = 2048
SAVED_EVERY = 64


@dataclass(frozen=True)
class Settings:
    """Settings of a pass."""

    top: int = 50  # number of triggers of each key
    positions: int = 1000  # number of positions in the sample
    seed: int = 0  # seed of all draws


@dataclass(eq=False)
class Pass:
    """State of a pass: all that it has collected; mutable while it runs.

    The sample holds, for each layer, `LAYER/before`, `/added` and `/after` [n, d_model] (see `Seen`), `/positive`, the
    bits of m > 0 [n, d_ff / 8], and `/activity`: numbers of memories active by sign and by norm, and their effective
    number [n, 3] (see `values`).
    """

    about: dict[str, Any]  # the inputs of the pass: model, text and settings, plain JSON
    triggers: dict[int, Triggers]  # by layer
    sample: Sample
    unigrams: Tensor  # how often each token was run, [vocabulary]
    pairs: Tensor  # how often each pair of tokens was run, by hash, [PAIRS]
    rows: int = 0  # number of rows that were run
    tokens: int = 0  # number of positions that were run
    complete: bool = False  # whether the whole text was run

    @property
    def settings(self) -> Settings:
        """Settings that the pass was started with."""
        return Settings(**self.about["settings"])

    @property
    def text(self) -> Frequencies:
        """Frequencies of the text's tokens and pairs of tokens."""
        return Frequencies(self.unigrams, self.pairs)

    def save(self, folder: Path) -> None:
        """Write the state to a folder, atomically; EditError where it cannot be written."""
        tensors = {"unigrams": self.unigrams, "pairs": self.pairs, **self.sample.tensors()}
        for layer, triggers in self.triggers.items():
            tensors |= triggers.tensors(f"triggers/{layer}")
        counts = {name: getattr(self, name) for name in ("rows", "tokens", "complete")}
        save_state(folder / FILE, tensors, {"about": self.about, "layers": list(self.triggers), **counts})

    @classmethod
    def load(cls, folder: Path) -> Pass:
        """Read a state that `save` wrote; EditError where the file is missing or damaged."""
        refusal = "no pass of `ffedit inspect model`; name its folder, or inspect anew with --force"
        tensors, counts = load_state(folder / FILE, refusal)
        triggers = {layer: Triggers.of(tensors, f"triggers/{layer}") for layer in counts.pop("layers")}
        about = counts.pop("about")
        sample = Sample.of(tensors, Settings(**about["settings"]).positions)
        return cls(about, triggers, sample, tensors["unigrams"], tensors["pairs"], **counts)


def started(stack: Stack, about: dict[str, Any]) -> Pass:
    """Return an empty pass with `about["settings"]`; see `Pass.about`."""
    settings = Settings(**about["settings"])
    triggers = {layer: Triggers.none(ff.d_ff, settings.top) for layer, ff in enumerate(stack.feed_forward)}
    counts = torch.zeros(stack.vocabulary, dtype=torch.int64), torch.zeros(PAIRS, dtype=torch.int64)
    return Pass(about, triggers, Sample(settings.positions), *counts)


def resumed(stack: Stack, folder: Path, about: dict[str, Any]) -> Pass:
    """Load the pass in `folder`, or start a new one; EditError where it is another one, or damaged."""
    if not (folder / FILE).exists():
        return started(stack, about)
    state = Pass.load(folder)
    if other := differences(state.about, about):
        raise EditError(f"{folder}: holds another pass ({other}); name another folder, or --force")
    return state


def collect(
    stack: Stack, text: Iterable[Row], total: int, state: Pass, folder: Path, progress: Progress = silent
) -> RowStore:
    """Run the rest of `text`, which `state` does not cover yet, through a stack; store rows and state in `folder`.

    `total` is the number of positions, at most, for the progress. The state is complete when this returns. EditError
    where the text is not the one that `state` was collected from, coefficients or states are not finite, or the folder
    cannot be written.
    """
    store = RowStore(folder, layout=RowLayout.of(stack))
    for layer, triggers in state.triggers.items():
        triggers.to_(storage.device_of(stack.feed_forward[layer].memories[0].module))
    try:
        for number, rows in enumerate(chunks(iter(text))):
            done = state.rows - number * CHUNK
            new = done <= 0
            if new:
                store.append(rows)
            elif not store.holds(rows):
                raise EditError(f"{folder}: was begun with another text; name another folder, or --force")
            # Rows of one length need no padding; an interrupted pass continues with the batches of one that was not.
            for batch in batches([len(row) - 1 for row in rows], TOKENS_PER_BATCH):
                if done > 0:
                    done -= len(batch)
                    continue
                with delay_interrupt():
                    _run(stack, state, [rows[i] for i in batch], number * CHUNK + torch.tensor(batch))
                progress("inspecting", state.tokens, total)
            if number % SAVED_EVERY == SAVED_EVERY - 1 and new:
                state.save(folder)
        if state.rows != store.count:
            raise EditError(f"{folder}: was begun with a longer text; name another folder, or --force")
    except KeyboardInterrupt:
        state.save(folder)
        raise
    kept = [triggers.coefficients for triggers in state.triggers.values()] + list(state.sample.values.values())
    if not all(bool(tensor.isfinite().all()) for tensor in kept):
        raise EditError(
            "some coefficients or states are not finite: the model overflows on this text; use --dtype float32"
        )
    state.complete = True
    state.save(folder)
    return store


@torch.no_grad()
def _run(stack: Stack, state: Pass, rows: Sequence[Row], numbers: Tensor) -> None:
    """Run rows, whose indices in the text are `numbers` [rows], and update `state` from every layer."""
    ids, inside, others = RowLayout.of(stack).inputs(rows)
    real = inside.view(-1).nonzero()[:, 0]
    if stack.causal:
        hashes = prefix_hashes(ids).view(-1)
    else:  # of the whole row, and the index in it
        last = torch.tensor([[len(row) - 1] for row in rows])
        hashes = mixed(prefix_hashes(pad(rows)).gather(1, last) + torch.arange(ids.shape[1])).view(-1)
    positions = (numbers[:, None] * WIDTH + torch.arange(ids.shape[1])).view(-1)
    ranks = mixed(mixed(hashes[real] ^ mixed(positions[real] + 1)) ^ mixed(torch.tensor(state.settings.seed + 1)))
    entering = state.sample.entering(ranks)
    sampled, values = real[entering], dict[str, Tensor]()
    # The first occurrence of each hash; `real` is put in text order, and the sort is stable.
    in_order = real[positions[real].argsort()]
    order = hashes[in_order].sort(stable=True)
    first = torch.ones(len(real), dtype=torch.bool)
    first[1:] = order.values[1:] != order.values[:-1]
    once = in_order[order.indices[first]].sort().values

    def see(seen: Seen) -> None:
        m = seen.key.flatten(0, 1)
        different = m if len(once) == len(m) else m[once.to(m.device)]
        state.triggers[seen.layer].update(different, positions[once].to(m.device), hashes[once].to(m.device))
        if len(sampled):
            sample = _sampled(stack.feed_forward[seen.layer], seen, sampled.to(m.device))
            values.update({f"{seen.layer}/{name}": tensor for name, tensor in sample.items()})

    stack.stream(ids, see, *others)
    if values:
        state.sample.take(ranks[entering], positions[sampled], values)
    state.unigrams += ids[inside].bincount(minlength=len(state.unigrams))
    state.pairs += pair_hash(ids[:, :-1], ids[:, 1:])[inside[:, 1:]].bincount(minlength=PAIRS)
    state.rows += len(rows)
    state.tokens += int(inside.sum())


def _sampled(layer: FeedForward, seen: Seen, at: Tensor) -> dict[str, Tensor]:
    """Return the values of a layer at the flat positions `at` that the sample stores; see `Pass.sample`."""
    streams = (seen.key, seen.output, seen.total, seen.added, seen.after)
    key, output, total, added, after = (stream.flatten(0, 1)[at].float() for stream in streams)
    norms = torch.cat([torch.linalg.vector_norm(memory.value.float(), dim=0) for memory in layer.memories])
    strengths = key.abs() * norms
    by_norm = (strengths >= ACTIVE * torch.linalg.vector_norm(output, dim=1, keepdim=True)).sum(1)
    return {
        "before": (total - added).cpu(),
        "added": added.cpu(),
        "after": after.cpu(),
        "positive": torch.from_numpy(np.packbits((key > 0).cpu().numpy(), axis=1)),
        "activity": torch.stack([(key > 0).sum(1), by_norm, effective_number(strengths)], 1).float().cpu(),
    }


def merge_passes(stack: Stack, folders: Sequence[Path], out: Path, force: bool = False) -> tuple[Pass, RowStore]:
    """Write what one pass over all texts of `folders`, in order, would give to the folder `out`.

    Raises:
        EditError: a folder holds no finished pass, or one of another model or stack, the settings differ, two are over
            the same text, or `out` cannot be written.
    """
    states = [Pass.load(folder) for folder in folders]
    merged, texts = states[0], dict[str, Path]()
    about = {"fingerprint": fingerprint(stack), "stack": stack.kind, "settings": merged.about["settings"]}
    stores = [RowStore(folder, state.rows) for folder, state in zip(folders, states, strict=True)]
    for folder, state, store in zip(folders, states, stores, strict=True):
        if not state.complete:
            raise EditError(f"{folder}: its pass was interrupted; finish it with the same command, then merge")
        if other := differences({name: state.about.get(name) for name in about}, about):
            raise EditError(f"{folder}: another model, stack or settings ({other}); merge passes with the same ones")
        if (text := store.digest()) in texts:
            raise EditError(
                f"{folder}: holds the text of {texts[text]}, which would count twice; merge passes over different texts"
            )
        texts[text] = folder
    for state in states[1:]:
        for layer, triggers in merged.triggers.items():
            triggers.extend(state.triggers[layer], merged.rows)
        merged.sample.take(state.sample.ranks, state.sample.positions + merged.rows * WIDTH, state.sample.values)
        for name in ("unigrams", "pairs", "rows", "tokens"):
            setattr(merged, name, getattr(merged, name) + getattr(state, name))
        merged.about["corpus"] += f" + {state.about['corpus']}"
        merged.about["tokens"] += state.about["tokens"]
    with written(out, force) as folder:
        store = RowStore(folder)
        for rows in chunks(chain.from_iterable(stores)):
            store.append(rows)
        merged.save(folder)
    return merged, RowStore(out, merged.rows, RowLayout.of(stack))
