"""Write facts: choose keys and values, solve for the smallest change, keep it as an `Edit`."""

from ffedit.corpus import Corpus, tokens_for
from ffedit.editor.batch import Problem
from ffedit.editor.config import PAPER, PAPER_MEMIT, PRESETS, EditConfig, preset
from ffedit.editor.edit import Edit, applied_edits
from ffedit.editor.keys import Reading, read
from ffedit.editor.methods import METHODS, Method, check_method, write
from ffedit.editor.statistics import collect, collect_moments
from ffedit.editor.statistics_folder import load_stats, merge_stats, save_stats
from ffedit.editor.target import Value, choose_values
from ffedit.editor.union import combine
from ffedit.editor.wording import Wording, word
from ffedit.facts import by_subject

__all__ = [
    "METHODS",
    "PAPER",
    "PAPER_MEMIT",
    "PRESETS",
    "Corpus",
    "Edit",
    "EditConfig",
    "Method",
    "Problem",
    "Reading",
    "Value",
    "Wording",
    "applied_edits",
    "by_subject",
    "check_method",
    "choose_values",
    "collect",
    "collect_moments",
    "combine",
    "load_stats",
    "merge_stats",
    "preset",
    "read",
    "save_stats",
    "tokens_for",
    "word",
    "write",
]
