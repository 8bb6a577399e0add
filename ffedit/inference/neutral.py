"""The text that ships with ffedit, for key statistics: a model that speaks English need not sample one.

Sampling runs the whole model once for each token, while statistics run a given text up to the edited layer only: on a
real model the sampling is nearly all of the price. So a neutral English text ships. It was sampled once, by
`evaluations/scripts/make_neutral_text.py`, from SmolLM2-135M-Instruct (Apache 2.0), on many subjects and in many forms:
it is nobody's, and nothing that it says is to be believed. It was not chosen with any edit in view.

A model of another language, of a closed vocabulary or of a little world of its own is not asked to read it: one pass
over its beginning tells whether the model speaks it, in nats per character, which mean the same for every tokenizer.
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
# A model speaks the text that it predicts at no more than this, in nats per character, over so many tokens.
SPOKEN = 1.0
READ_TOKENS = 128


@once
def neutral_text() -> str:
    """All of it."""
    return gzip.decompress(TEXT.read_bytes()).decode()


def neutral(editable: Editable) -> Tensor | None:
    """The ids of the text that ships, [tokens], int32, from the cache where they are there; None: it is not spoken."""
    about = f"{sha256(TEXT.read_bytes()).hexdigest()}-{SPOKEN}-{fingerprint(editable)}"
    path = cache.path("texts", sha256(about.encode()).hexdigest()[:16], ".safetensors")
    ids = _kept(path)
    if ids is None:
        if not nats_per_character(editable, neutral_text()) <= SPOKEN:
            return None
        found = editable.tokenizer(neutral_text(), add_special_tokens=False, verbose=False)["input_ids"]
        ids = torch.tensor(found, dtype=torch.int32)
        cache.write(path, lambda temporary: save_file({"ids": ids}, temporary))
    return ids


def _kept(path: Path) -> Tensor | None:
    """What was tokenised before; None where nothing was, or the file is damaged."""
    try:
        return load_file(path)["ids"] if path.exists() else None
    except (OSError, SafetensorError, KeyError):
        return None


@torch.no_grad()
def nats_per_character(editable: Editable, text: str) -> float:
    """How badly the model predicts the beginning of `text`; infinite where its tokenizer does not know all of it."""
    ids = editable.tokenizer(text[: 8 * READ_TOKENS], verbose=False)["input_ids"]
    ids = ids[: min(READ_TOKENS, editable.max_tokens)]
    said = decode(editable.tokenizer, ids[1:], special=False)
    if editable.tokenizer.unk_token_id in ids or not said.strip():
        return float("inf")
    reads = torch.tensor([(0, at) for at in range(len(ids) - 1)])
    logits = replay.forward(editable, torch.tensor([ids]), reads)
    scores = logits.float().log_softmax(-1).gather(-1, torch.tensor(ids[1:], device=logits.device)[:, None])
    return -float(scores.sum()) / len(said)
