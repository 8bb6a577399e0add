"""Write facts: compute keys and values, solve for the smallest change, return it as an `Edit`."""

from ffedit.editor.combine import combine
from ffedit.editor.config import EditConfig, KeyConfig, PromptConfig, ValueConfig
from ffedit.editor.edit import Edit, applied_edits
from ffedit.editor.key import LayerKeys, read
from ffedit.editor.methods import METHODS, Method, check_method, preset, preset_names
from ffedit.editor.prompts import PromptSet, build_prompts
from ffedit.editor.set_numbers import config_from_dict, set_number, set_numbers
from ffedit.editor.solve import Problem
from ffedit.editor.statistics import collect, load_stats, merge_stats, save_stats
from ffedit.editor.value import Value, choose_values
from ffedit.editor.write import write
from ffedit.facts.fact import by_subject
from ffedit.inference.text import Corpus, tokens_for

__all__ = [
    "METHODS",
    "Corpus",
    "Edit",
    "EditConfig",
    "KeyConfig",
    "LayerKeys",
    "Method",
    "Problem",
    "PromptConfig",
    "PromptSet",
    "Value",
    "ValueConfig",
    "applied_edits",
    "build_prompts",
    "by_subject",
    "check_method",
    "choose_values",
    "collect",
    "combine",
    "config_from_dict",
    "load_stats",
    "merge_stats",
    "preset",
    "preset_names",
    "read",
    "save_stats",
    "set_number",
    "set_numbers",
    "tokens_for",
    "write",
]
