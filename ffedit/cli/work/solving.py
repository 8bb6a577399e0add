"""Settings and key statistics of an edit, from the options of a command."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import ffedit
from ffedit.algebra.key_moments import KeyMoments
from ffedit.cli.options import Solving
from ffedit.editor.config import EditConfig
from ffedit.editor.methods import METHODS, check_method, preset, set_numbers
from ffedit.editor.statistics import text_for
from ffedit.errors import EditError
from ffedit.facts.reading import read_protected
from ffedit.inference.corpus import Corpus
from ffedit.model.editable import Editable
from ffedit.model.memory import Address


def config_of(solving: Solving, method: str, beside: Collection[str] = ()) -> EditConfig:
    """Return the settings of a method, which runs `beside` others.

    Raises EditError for an unknown method, one that cannot protect, and a setting of a method that does not run.
    """
    entries = () if solving.protect is None else read_protected(solving.protect)
    config = replace(set_numbers(preset(solving.preset_name, method), solving.settings), seed=solving.seed)
    for setting in solving.settings:
        if (owner := setting.partition(".")[0]) in METHODS and owner not in (method, *beside):
            raise EditError(f"--set {setting} is a setting of {owner}, which does not run; leave it out")
    config = replace(config, key=replace(config.key, protect=(*config.key.protect, *entries)))
    return check_method(method).complete(config)


def stats_of(
    solving: Solving, subjects: int, editable: Editable, configs: Iterable[EditConfig]
) -> Corpus | Mapping[Address, KeyMoments]:
    """Return the statistics of `--stats`, or else the text to collect them on for edits of `subjects` subjects."""
    if solving.stats_from is not None:
        return ffedit.load_stats(solving.stats_from, editable)
    names = all(config.key.names_weight > 0 for config in configs)
    return text_for(editable, subjects, solving.seed, solving.corpus, names)
