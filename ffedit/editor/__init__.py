"""Write facts: compute keys and values, solve for the smallest change, return it as an `Edit`."""

from ffedit.editor.combine import combine
from ffedit.editor.config import PAPER, PAPER_MEMIT, PRESETS, EditConfig, preset
from ffedit.editor.edit import Edit, applied_edits
from ffedit.editor.key import LayerKeys, read
from ffedit.editor.methods.registry import METHODS, Method, check_method, write
from ffedit.editor.prompts import PromptSet, build_prompts
from ffedit.editor.solve import Problem
from ffedit.editor.statistics import collect, collect_moments
from ffedit.editor.statistics_folder import load_stats, merge_stats, save_stats
from ffedit.editor.value import Value, choose_values
from ffedit.facts.fact import by_subject
from ffedit.inference.text import Corpus, tokens_for

__all__ = [
    "METHODS",
    "PAPER",
    "PAPER_MEMIT",
    "PRESETS",
    "Corpus",
    "Edit",
    "EditConfig",
    "LayerKeys",
    "Method",
    "Problem",
    "PromptSet",
    "Value",
    "applied_edits",
    "build_prompts",
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
    "write",
]
