"""Choice of a text for a computation, and of its length; `inference.text` reads the text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from os.path import isdir, isfile  # False where pathlib's raise an OSError
from pathlib import Path

from ffedit.errors import EditError, FFEditError

# Stands for text sampled from the model, instead of a file's path.
SAMPLED = "sampled"
# Fewest tokens for one subject; fewest for several; most for many.
ONE, FEWEST, MOST = 2**12, 2**15, 2**17
SEEDS = 2**32  # seeds are smaller, so that every random generator takes them
LONGEST = 255  # bytes of a file's name
# name, organisation/name, each with :configuration and perhaps :split behind it
DATASET = re.compile(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]+){0,2}")


def tokens_for(subjects: int, d_ff: int, names: bool = True) -> int:
    """Return the number of tokens of text to use for an edit of so many subjects in a layer of `d_ff` keys.

    For one subject, scores hardly depend on it once there is half a key for each dimension, if `names` add keys to
    those of the text (docs/scale.md, "Fewer tokens"). Each fact may disturb directions that C has not seen; over
    a batch this adds up, so that more text is worth its cost.
    """
    if subjects == 1 and names:
        return min(FEWEST, max(ONE, d_ff // 2))
    return min(MOST, FEWEST * (1 + subjects // 16))


def as_seed(seed: object, error: type[FFEditError] = EditError) -> int:
    """Return `seed` as an int; raise `error` unless it is a whole number from 0 to 2³² − 1."""
    number = error.whole("seed", seed, 0)
    if number >= SEEDS:
        raise error(f"seed is {number}; a whole number below {SEEDS} was expected")
    return number


def check_corpus(corpus: object) -> None:
    """Raise EditError for anything but a `Corpus` or None."""
    EditError.require(corpus, (Corpus, type(None)), "a text was expected; give it as ffedit.Corpus('file.txt')")


@dataclass(frozen=True)
class Corpus:
    """Source of a text.

    Attributes:
        path: a UTF-8 text file, JSON with a field "text" (.jsonl: one record a line; .json: a list), or a dataset of
            the hub as NAME, NAME:CONFIGURATION or NAME:CONFIGURATION:SPLIT; "sampled" for text that the model samples;
            None for the text that comes with ffedit where the model predicts it well, and else for sampled text.
        tokens: number of tokens to use, at most.
        seed: seed of the sampling.
    """

    path: Path | str | None = None
    tokens: int = FEWEST
    seed: int = 0

    def __post_init__(self) -> None:
        EditError.require(self.path, (Path, str, type(None)), "the path of a text was expected")
        path = str(self.path)
        longest = max(len(part.encode("utf-8", "replace")) for part in path.split("/"))
        if longest > LONGEST or "\n" in path or "\0" in path:
            raise EditError(f"found {path[:40]!r}… where the path of a text was expected; write the text to a file")
        object.__setattr__(self, "tokens", EditError.whole("tokens", self.tokens, 1))
        object.__setattr__(self, "seed", as_seed(self.seed))

    @property
    def named(self) -> Path | str | None:
        """File or dataset; None for sampled text, or the text that comes with ffedit."""
        return None if self.path == SAMPLED else self.path

    def __str__(self) -> str:
        if self.named is None:
            return f"text sampled from the model (seed {self.seed})"
        return Path(self.named).name if isfile(self.named) else str(self.named)

    def check(self) -> None:
        """Check that the source can be a text, before any long work.

        Raises:
            EditError: there is no such file, and the name is no dataset's, or datasets cannot be read.
        """
        if self.named is None or isfile(self.named):
            return
        name = str(self.path)
        if isdir(name):
            raise EditError(f"{name}: a folder; a text file or the name of a dataset was expected")
        # A name with a file's suffix is a missing file.
        if not DATASET.fullmatch(name) or Path(name).suffix[1:].isalpha():
            raise EditError(f"{name}: no such file; a UTF-8 text file, .jsonl, .json or a dataset's name was expected")
        if find_spec("datasets") is None:
            raise EditError(f"{name}: no such file; to read it as a dataset of the hub, pip install 'ffedit[datasets]'")
