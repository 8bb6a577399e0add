"""The English text that comes with ffedit, for key statistics, so that an English model need not sample one.

Sampling runs the whole model once for each token, while statistics run a given text up to the edited layer only: on a
real model the sampling is nearly all of the cost. The text was sampled once, by
`evaluations/scripts/make_neutral_text.py`, from SmolLM2-135M-Instruct (Apache 2.0), on many subjects and in many forms:
it has no author, and its statements are not reliable. It was not chosen with regard to any edit.

It is not used for a model of another language, of a closed vocabulary or of an artificial world: one pass
over its beginning measures how well the model predicts it, in nats per character, comparable between tokenizers.
"""

from __future__ import annotations

import gzip
from functools import cache as once
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ffedit.files import cache
from ffedit.inference import replay
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.tokenization import decode

TEXT = Path(__file__).with_name("neutral.txt.gz")
WORDS = "the neutral text that ships with ffedit"
# The text is used for a model that predicts its first READ_TOKENS tokens at no more than SPOKEN nats per character.
SPOKEN = 1.0
READ_TOKENS = 128


@once
def neutral_text() -> str:
    """Return the whole text."""
    return gzip.decompress(TEXT.read_bytes()).decode()


def neutral(editable: Editable) -> Tensor | None:
    """Return the text's ids, [tokens], int32, cached where possible; None where the model predicts the text badly."""
    about = f"{sha256(TEXT.read_bytes()).hexdigest()}-{SPOKEN}-{fingerprint(editable)}"
    path = cache.path("texts", sha256(about.encode()).hexdigest()[:16], ".safetensors")
    ids = _kept(path)
    if ids is None:
        if not nats_per_character(editable, neutral_text()) <= SPOKEN:
            return None
        encoded = editable.tokenizer(neutral_text(), add_special_tokens=False, verbose=False)["input_ids"]
        ids = torch.tensor(encoded, dtype=torch.int32)
        cache.write(path, lambda temporary: save_file({"ids": ids}, temporary))
    return ids


def _kept(path: Path) -> Tensor | None:
    """Return the cached ids; None where there are none, or the file is damaged."""
    try:
        return load_file(path)["ids"] if path.exists() else None
    except (OSError, SafetensorError, KeyError):
        return None


@torch.no_grad()
def nats_per_character(editable: Editable, text: str) -> float:
    """Return the model's nats per character on the beginning of `text`; infinite for unknown tokens."""
    ids = editable.tokenizer(text[: 8 * READ_TOKENS], verbose=False)["input_ids"]
    ids = ids[: min(READ_TOKENS, editable.max_tokens)]
    said = decode(editable.tokenizer, ids[1:], special=False)
    if editable.tokenizer.unk_token_id in ids or not said.strip():
        return float("inf")
    reads = torch.tensor([(0, at) for at in range(len(ids) - 1)])
    logits = replay.forward(editable, torch.tensor([ids]), reads)
    scores = logits.float().log_softmax(-1).gather(-1, torch.tensor(ids[1:], device=logits.device)[:, None])
    return -float(scores.sum()) / len(said)
