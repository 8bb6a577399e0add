"""Collect the second moments of the keys of several layers in one pass over ordinary text, and cache them.

C = E[k kᵀ] determines which keys an edit disturbs least. The expectation is the mean over running text, as published
with ROME: a word counts as often as it occurs.

A row of text begins as the model's texts do, with the tokens that the tokenizer puts in front (`text.begin_rows`). They
are not text, and the first token of a row is an attention sink, whose key does not depend on which token it is: both
are left out. Later sinks are detected by the norm of their keys (`key_moments`).

One forward pass computes the keys of every layer up to the deepest one requested. The result is cached under a
fingerprint of everything it depends on; so is an interrupted pass. Statistics of another model, layer or precision
would silently make an edit worse, so each file (`statistics_files`) holds the fingerprint, too, and the names that
the error about a mismatch shows.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ffedit.algebra.key_moments import HELD, KeyMoments, KeyMomentsFitter
from ffedit.editor.edit import unedited
from ffedit.errors import EditError
from ffedit.files import cache
from ffedit.files.atomic import read_whole
from ffedit.files.placing import delay_interrupt
from ffedit.files.resuming import kept, load_state, save_state
from ffedit.inference import replay
from ffedit.inference.batching import refuse_out_of_memory, split_on_oom
from ffedit.inference.corpus import FEWEST, Corpus, tokens_for
from ffedit.inference.own_text import sampled
from ffedit.inference.precision import averaging_dtype, computed_in
from ffedit.inference.text import NEUTRAL_NAME, begin_rows, corpus_ids, identity, neutral, row_length
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward, Keys
from ffedit.model.fingerprint import fingerprint
from ffedit.model.memory import Address, KeyValueMemory
from ffedit.model.storage import device_of, host_memory, solve_device
from ffedit.progress import Progress, silent

logger = logging.getLogger(__name__)

# A few thousand keys: enough for fast matrix products, few enough for float32 sums.
ROWS_PER_BATCH = 64
SAVED_EVERY = 32
# Largest number of matrices of C's size that LAPACK holds to compute its eigenvectors.
EIGH = 6
# Version of the rules for which tokens count and how much; cached statistics of other versions are ignored.
RULES = 3


def collect(
    editable: Editable,
    memories: Sequence[KeyValueMemory],
    corpus: Corpus | None = None,
    progress: Progress = silent,
) -> dict[Address, KeyMoments]:
    """Collect C of all `memories` over `corpus`: cached moments are read, the others computed in one pass.

    EditError where the corpus, or the model's keys on it, cannot be used.
    """
    corpus = corpus or Corpus()
    ids, text_name = _text(editable, corpus, progress)
    if (corpus.tokens if ids is None else len(ids)) <= max(1, len(editable.start_tokens)):
        raise EditError(f"{text_name}: a single token was found; key statistics need some thousands")
    text, beginning = identity(editable, corpus, ids)
    dtype = averaging_dtype(editable)
    marks, rules = _marks(editable, memories), _rules(editable)
    paths = {at: cache.entry("moments", f"{mark}:{text}:{rules}") for at, mark in marks.items()}
    collected = {at: moments for at, path in paths.items() if (moments := _cached(path, marks[at]))}
    missing = sorted((m for m in memories if m.address not in collected), key=lambda memory: memory.address)
    # Named by all memories, so that a process that was killed between two entries resumes the same pass.
    unfinished = cache.entry("passes", f"{rules}:{text}:{sorted(marks.values())}")
    if missing:
        _check_room(missing)
        ids = sampled(editable, corpus, text, progress) if ids is None else ids
        ids = begin_rows(editable, ids)
        with computed_in(editable, dtype):
            fitters, seconds = _pass(editable, missing, text_name, ids, unfinished, progress)
        layers = [str(memory.address) for memory in missing]
        logger.info("keys of %s over %d tokens of %s in %.1f s", layers, len(ids), text_name, seconds)
        source = text_name
        if dtype != editable.model.dtype:
            source += f", computed in {str(dtype).removeprefix('torch.')}"
        attributes = {"texts": (beginning,), "model": editable.name, "seconds": seconds}
        for memory in missing:
            at, weights = memory.address, str(memory.dtype).removeprefix("torch.")
            with refuse_out_of_memory(_no_room(missing)):
                device = solve_device(device_of(memory.module), HELD * memory.d_ff**2)
                fitter = fitters.pop(at)
                collected[at] = fitter.moments(source, marks[at], device, address=str(at), dtype=weights, **attributes)
            cache.write(paths[at], collected[at].save)
    cache.forget(unfinished)
    return {memory.address: collected[memory.address] for memory in memories}


def in_cache(editable: Editable, memories: Iterable[KeyValueMemory], corpus: Corpus) -> list[Address]:
    """Return those of `memories` whose moments `collect` would read from the cache."""
    text, _ = identity(editable, corpus, _text(editable, corpus, silent)[0])
    marks, rules = _marks(editable, memories).items(), _rules(editable)
    return [at for at, mark in marks if cache.entry("moments", f"{mark}:{text}:{rules}").exists()]


def _marks(editable: Editable, memories: Iterable[KeyValueMemory]) -> dict[Address, str]:
    """Fingerprint all that the keys of each memory depend on, except the text: nothing above its layer."""
    addresses = [memory.address for memory in memories]
    layers = {layer: fingerprint(editable, layer) for layer in {at.layer for at in addresses}}
    return {at: f"{layers[at.layer]}:{at}" for at in addresses}


def _rules(editable: Editable) -> str:
    """Name the rules by which the tokens of a text count, and the precision of a pass where it is not the model's."""
    dtype = averaging_dtype(editable)
    return f"tokens:{RULES}{'' if dtype == editable.model.dtype else f':{dtype}'}"


def _text(editable: Editable, corpus: Corpus, progress: Progress) -> tuple[Tensor | None, str]:
    """Return the token ids of an existing text, [tokens or fewer], or None if it is to be sampled; and its name."""
    if corpus.named is not None:
        return corpus_ids(editable, corpus, progress), str(corpus)
    shipped = neutral(editable) if corpus.path is None else None
    return (None, str(corpus)) if shipped is None else (shipped[: corpus.tokens], NEUTRAL_NAME)


def _cached(path: Path, fingerprint: str) -> KeyMoments | None:
    """Read cached moments; None if the file is missing, damaged, or of another version."""
    try:
        return read_whole(path, lambda file: KeyMoments.load(file, fingerprint))
    except (EditError, OSError):
        return None


def cached_eigh(C: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, ascending, and eigenvectors of C [d_ff, d_ff], all float64 on the CPU; they are cached.

    They are named by the numbers of C itself, whatever text or folder it came from. `device` computes them, if it has
    room for `EIGH` such matrices.
    """

    def make() -> dict[str, Tensor]:
        values, vectors = (tensor.cpu() for tensor in torch.linalg.eigh(C.to(solve_device(device, EIGH * C.numel()))))
        return {"values": values, "vectors": vectors.contiguous()}

    name = hashlib.sha256(C.contiguous().numpy().data).hexdigest()[:24]
    tensors = kept(cache.path("eigenvectors", name, ".safetensors"), make)
    return tensors["values"], tensors["vectors"]


def moments_for(
    editable: Editable,
    memories: Sequence[KeyValueMemory],
    stats: Corpus | Mapping[Address, KeyMoments] | None,
    subjects: int,
    seed: int,
    progress: Progress = silent,
    names: bool = True,
) -> Mapping[Address, KeyMoments]:
    """Return the second moments of `memories` for an edit: `stats`, or those of the text `stats` or a default one."""
    if stats is None:
        stats = text_for(editable, subjects, seed, names=names)
    if isinstance(stats, Corpus):
        stats = collect(editable, memories, stats, progress)
    else:
        check_stats(editable, memories, stats)
    for memory in memories:
        moments = stats[memory.address]
        if not moments.keys:
            raise EditError(
                f"expert {memory.address} of {moments.model}: none of the {moments.count:,} tokens of {moments.source} "
                "reached it, so it has no key statistics; collect them over more text, or over text that reaches it "
                "(`ffedit stats --tokens`, `--corpus`)"
            )
    return stats


def text_for(
    editable: Editable, subjects: int, seed: int, path: Path | str | None = None, names: bool = True
) -> Corpus:
    """Return the text for an edit of so many subjects, with as many tokens as the largest layer of the model needs.

    It is `path`, a file or dataset as in `Corpus`, of which at least `FEWEST` tokens are read, or else the default
    text. More tokens are read where no `names` count beside them.
    """
    tokens = tokens_for(subjects, max(ff.d_ff for ff in editable.feed_forward), names)
    return Corpus(path, tokens if path is None else max(tokens, FEWEST), seed)


def check_stats(editable: Editable, memories: Sequence[KeyValueMemory], stats: Mapping[Address, KeyMoments]) -> None:
    """Check that `stats` are the second moments of all `memories`.

    Edits applied below a layer change its keys only slightly, so statistics of the unedited model are accepted too.
    """
    if missing := [memory.address for memory in memories if memory.address not in stats]:
        raise EditError(f"no statistics of layer {missing[0]} were given; collect them with `ffedit stats`")
    for memory in differing(editable, memories, stats):
        raise misfit(stats[memory.address], memory, editable)


def differing(
    editable: Editable, memories: Sequence[KeyValueMemory], stats: Mapping[Address, KeyMoments]
) -> list[KeyValueMemory]:
    """List the memories whose statistics were collected neither on the current nor on the unedited weights."""

    def of_others(memories: Sequence[KeyValueMemory]) -> list[KeyValueMemory]:
        marks = _marks(editable, memories)
        return [memory for memory in memories if stats[memory.address].fingerprint != marks[memory.address]]

    differ = of_others(memories)
    if differ and editable.history.originals:
        with unedited(editable):
            differ = of_others(differ)
    return differ


def misfit(moments: KeyMoments, memory: KeyValueMemory | None, editable: Editable) -> EditError:
    """Return the error that says how a memory differs from the one that its statistics were collected for."""
    why = "the weights below that layer, or the tokenizer, have changed since they were collected (edited?)"
    if memory is None:
        why = f"{editable.name} has layers 0 to {len(editable.layers) - 1}"
    else:
        dtype = str(memory.dtype).removeprefix("torch.")
        if (moments.address, moments.dtype, len(moments.sum)) != (str(memory.address), dtype, memory.d_ff):
            why = f"layer {memory.address} of {editable.name} has {dtype}, d_ff {memory.d_ff}"
    return EditError(f"these are statistics of {moments.of}, but {why}; collect them anew with `ffedit stats`")


@torch.no_grad()
def _pass(
    editable: Editable,
    memories: Sequence[KeyValueMemory],
    text_name: str,
    ids: Tensor,
    unfinished: Path,
    progress: Progress,
) -> tuple[dict[Address, KeyMomentsFitter], float]:
    """Sum the moments of all `memories` over `ids`, a text called `text_name`; return them and the seconds taken.

    A pass that was interrupted is resumed from `unfinished`.
    """
    length = row_length(editable)
    weights = _weights(len(ids), length, len(editable.start_tokens))
    # Even a short text is split into two batches, so that its halves can be compared.
    size = length * max(1, min(ROWS_PER_BATCH, -(-len(ids) // (2 * length))))
    fitters = {memory.address: KeyMomentsFitter() for memory in memories}
    started = time.perf_counter() - _resume(unfinished, fitters)
    first = fitters[memories[0].address]
    try:
        while (batch := first.batches) * size < len(ids):
            now = slice(batch * size, (batch + 1) * size)
            with delay_interrupt():
                _batch(editable, fitters, ids[now], weights[now], length)
            for address, fitter in fitters.items():
                if not fitter.is_finite():
                    raise EditError(
                        f"the keys of layer {address} over {text_name} are not finite (tokens {now.start} to "
                        f"{min(now.stop, len(ids))}): the model overflows on this text; use another, or --dtype float32"
                    )
            progress("collecting key statistics", min(now.stop, len(ids)), len(ids))
            if first.batches % SAVED_EVERY == 0:
                _save(unfinished, fitters, time.perf_counter() - started)
    except KeyboardInterrupt:
        _save(unfinished, fitters, time.perf_counter() - started)
        raise
    return fitters, time.perf_counter() - started


def _save(unfinished: Path, fitters: Mapping[Address, KeyMomentsFitter], seconds: float) -> None:
    """Save the sums so far, if the cache can be written."""
    tensors, numbers = dict[str, Tensor](), {}
    for address, fitter in fitters.items():
        sums, numbers[str(address)] = fitter.state()
        tensors |= {f"{address}/{name}": tensor for name, tensor in sums.items()}
    cache.write(unfinished, partial(save_state, tensors=tensors, values={"fitters": numbers, "seconds": seconds}))


def _resume(unfinished: Path, fitters: Mapping[Address, KeyMomentsFitter]) -> float:
    """Restore what `_save` saved, if anything; return the seconds that it took."""
    try:
        tensors, values = load_state(unfinished, "this is not an unfinished pass of ffedit; delete it")
    except EditError:
        if unfinished.exists():
            raise
        return 0.0  # there is no such file, or another process has just finished the pass
    if not {str(address) for address in fitters} <= values["fitters"].keys():
        return 0.0  # entries that were cached when the pass began have been deleted since
    for address, fitter in fitters.items():
        sums = {name.removeprefix(f"{address}/"): t for name, t in tensors.items() if name.startswith(f"{address}/")}
        fitter.restore_(sums, values["fitters"][str(address)])
    return float(values["seconds"])


def _batch(
    editable: Editable, fitters: Mapping[Address, KeyMomentsFitter], ids: Tensor, weights: Tensor, length: int
) -> None:
    """Run `ids` [n] in rows of `length` up to the last layer; update each fitter with its keys on the way.

    If memory runs out, the rows are split; keys that fitters of lower layers have counted are not counted again.
    """
    rows = torch.zeros(-(-len(ids) // length), length, dtype=torch.long)
    rows.view(-1)[: len(ids)] = ids
    taken = dict.fromkeys(fitters, 0)
    ff_layers = by_layer(editable, fitters)

    def take(batch: Sequence[int], memory: KeyValueMemory, seen: Keys) -> None:
        before = batch[0] * length  # tokens of earlier rows
        start, stop = taken[memory.address], min((batch[-1] + 1) * length, len(ids))
        if start >= stop:
            return
        fitter, ends = fitters[memory.address], stop == len(ids)
        if seen.rows is None:
            fitter.update(seen.keys[start - before : stop - before], weights[start:stop], ends)
        else:
            at = seen.rows + before
            inside = (at >= start) & (at < stop)
            fitter.update(seen.keys[inside], weights[at[inside].cpu()], ends, stop - start)
        taken[memory.address] = stop

    def run(batch: Sequence[int]) -> None:
        with ExitStack() as stack:
            for ff in ff_layers:
                stack.enter_context(ff.watched(partial(take, batch)))
            stack.enter_context(ff_layers[-1].idle())
            replay.run_to(editable, rows[list(batch)], ff_layers[-1].layer)

    for _ in split_on_oom(run, range(len(rows)), _no_room([editable.memories[at] for at in fitters])):
        pass


def by_layer(editable: Editable, addresses: Iterable[Address]) -> list[FeedForward]:
    """Group memories by layer: each layer restricted to its addresses among `addresses`, in ascending order."""
    chosen = set(addresses)
    return [editable.feed_forward[layer].only(chosen) for layer in sorted({at.layer for at in chosen})]


def _check_room(memories: Sequence[KeyValueMemory]) -> None:
    """Refuse, before a text is read, statistics without room in memory."""
    needed = bytes_needed(memories)
    if (free := host_memory()) < needed:
        sizes = f"needed beside the model: {needed / 1e9:.2g} GB of memory; free: {free / 1e9:.2g} GB"
        raise EditError(f"{_no_room(memories)} ({sizes})")


def bytes_needed(memories: Sequence[KeyValueMemory]) -> int:
    """Return the bytes that key statistics take: all sums, and the ridge of one layer."""
    return 16 * sum(memory.d_ff**2 for memory in memories) + 8 * (HELD - 2) * max(m.d_ff for m in memories) ** 2


def _no_room(memories: Sequence[KeyValueMemory]) -> EditError:
    return EditError(
        f"not enough memory for the key statistics of {len(memories)} layers: the sums of each are 2 · d_ff² float64 "
        f"numbers ({16 * max(memory.d_ff for memory in memories) ** 2 / 1e9:.2g} GB); collect fewer layers at once, "
        "or use another --device"
    )


def _weights(count: int, length: int, start: int) -> Tensor:
    """Return token weights, [count], float64, of mean 1: equal, but 0 at a row's `start` tokens and at its first."""
    weights = torch.ones(count, dtype=torch.float64)
    for position in range(max(1, start)):
        weights[position::length] = 0
    return weights * (count / weights.sum())
