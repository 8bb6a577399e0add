"""Inspection of a model's feed-forward layers as key-value memories (Geva et al. 2021, arXiv 2012.14913)."""

from ffedit.inspector.edit_view import EditView, inspect_edit
from ffedit.inspector.memory_view import MemoryView, inspect_memory
from ffedit.inspector.prompt_view import PromptView, inspect_prompt
from ffedit.inspector.views import MemoryIndex

__all__ = ["EditView", "MemoryIndex", "MemoryView", "PromptView", "inspect_edit", "inspect_memory", "inspect_prompt"]
