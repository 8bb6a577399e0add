"""A short hash of a model's config, tokenizer and weights: it identifies the model of a statistic or an edit.

Statistics and edits carry it, so that those of another model, layer or precision are never used. Of each weight
the hash takes name, shape, dtype, sum and a strided sample of at most 4,096 entries: enough to notice any edit (a
rank-one update changes nearly every entry and the sum) and quick for large models. Sums are cached on the `Editable`,
so that each weight is read whole once per state, however often the hash is computed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ffedit.model import storage
from ffedit.model.editable import Editable

Cache: TypeAlias = "dict[str, tuple[Any, Any, Any]]"  # `Editable.hashed`
SAMPLE = 4096
PART = 2**18  # numbers summed at once on a CPU, so that they fit its cache: a sum copies them to int64
WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PROBE = "The Eiffel Tower, 300 m tall, was BUILT in 1889; it's in Paris.\n东京 Zürich\t"


@torch.no_grad()
def fingerprint(editable: Editable, below: int | None = None) -> str:
    """Return the hash, 16 hexadecimal digits; with `below`, only of the weights on which that layer's keys depend."""
    digest = hashlib.sha256()
    config = editable.model.config.get_text_config().to_dict()
    for name in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        config.pop(name, None)
    # A config may name another class, or none, until the model is saved for the first time.
    config["architectures"] = [type(editable.model).__name__]
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    tokenizer = editable.tokenizer
    # Read once per tokenizer, and again when tokens were added.
    vocabulary = tokenizer.get_vocab
    tokens = _once(editable.hashed, "", tokenizer, len(tokenizer), lambda: json.dumps(sorted(vocabulary().items())))
    digest.update(tokens.encode())
    # Tokenizers with one vocabulary may still differ: with and without a BOS, another normaliser, other merges.
    encoding = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer(PROBE, verbose=False)["input_ids"]]
    digest.update(json.dumps(encoding).encode())
    left_out: set[int] = set()
    if below is not None:  # the layers above, and the value matrix of this one
        above = editable.layers[below + 1 :]
        left_out = {id(p) for layer in above for p in layer.parameters()}
        left_out |= {id(tensor) for memory in editable.feed_forward[below].memories for tensor in memory.held}
    for name, weight in sorted(storage.parameters(editable.model)):
        if id(weight) not in left_out:
            flat = storage.fetched_from(editable.model, name).reshape(-1)
            sample = flat[:: max(1, -(-len(flat) // SAMPLE))].cpu().double().numpy().tobytes()
            total = _total(editable.hashed, name, weight, flat, sample)
            digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}{total}".encode())
            digest.update(sample)
    return digest.hexdigest()[:16]


def _total(hashed: Cache, name: str, weight: Tensor, flat: Tensor, sample: bytes) -> int:
    """Return the sum of a weight's entries as whole numbers, cached until tensor, address, version or sample change.

    A write through `.data` has no new version: one that changes no sampled entry goes unnoticed until `editable.hashed`
    is cleared. Offloaded and quantised weights are read each time.
    """
    if type(weight) not in (Tensor, torch.nn.Parameter) or weight.is_meta or weight.is_inference():
        return _summed(flat)
    state = weight.data_ptr(), weight._version, hash(sample)
    return int(_once(hashed, name, weight, state, lambda: _summed(flat)))


def _once(hashed: Cache, name: str, source: object, state: object, read: Callable[[], Any]) -> Any:
    """Return `read()`, cached under `name` while `source` is the same object in the same `state`."""
    cached = hashed.get(name)
    if cached is None or cached[0] is not source or cached[1] != state:
        cached = hashed[name] = source, state, read()
    return cached[2]


def _summed(flat: Tensor) -> int:
    """Sum the entries as whole numbers: the same in any order, on any device and with any number of threads."""
    whole = flat.view(WHOLE[flat.element_size()])
    return sum(int(chunk.sum(dtype=torch.int64)) for chunk in whole.split(PART if flat.is_cpu else 64 * PART))
