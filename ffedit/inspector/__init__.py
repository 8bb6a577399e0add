"""Inspection of a model's feed-forward layers as key-value memories (Geva et al. 2021, arXiv 2012.14913)."""

from ffedit.inspector.slots import Slot
from ffedit.inspector.views.edit_view import EditView, inspect_edit
from ffedit.inspector.views.memory_view import MemoryView, inspect_memory
from ffedit.inspector.views.model_view import inspect_model
from ffedit.inspector.views.prompt_view import PromptView, inspect_prompt

__all__ = [
    "EditView",
    "MemoryView",
    "PromptView",
    "Slot",
    "inspect_edit",
    "inspect_memory",
    "inspect_model",
    "inspect_prompt",
]
