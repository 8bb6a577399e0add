"""Loading of any model that reads text, by name, as its stacks: decoders, encoders, both halves of encoder–decoders.

The config tells the kind of a checkpoint. Editing needs a causal decoder (`load.load_model`); inspecting memories does
not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from ffedit.loading.device_map import DeviceMap, spread_over
from ffedit.loading.encoder_decoder import stacks
from ffedit.loading.load import Source, load_model, opened, read, ready_pair
from ffedit.model.editable import Stack
from ffedit.progress import Progress, silent


def load_stacks(
    name_or_path: Source = "atlas",
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    value_matrix: str | None = None,
    device_map: DeviceMap | None = None,
    offload_folder: str | Path | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    progress: Progress = silent,
) -> list[Stack]:
    """Load the stacks of a model, ready to be inspected, the encoder first; arguments as of `load`.

    Raises:
        ModelError: it cannot be found, read, recognised or spread; one line says why.
    """
    spread = spread_over(device, device_map, offload_folder, max_memory)
    if not isinstance(name_or_path, str | Path):
        pair = ready_pair(name_or_path, device, dtype, revision, trust_remote_code, device_map)
        return stacks(*pair, value_matrix)
    found = opened(str(name_or_path), revision, trust_remote_code, progress)
    if (reader := _reader(found.config)) is None:
        everything = (device, dtype, revision, trust_remote_code, value_matrix, device_map, offload_folder, max_memory)
        return [load_model(name_or_path, *everything, progress=progress)]
    model, tokenizer, _ = read(found, *reader, dtype, spread)
    return stacks(model, tokenizer, found.name, value_matrix)


def _reader(config: Any) -> tuple[Any, str] | None:
    """Return the transformers class for the model with its head, and the kind of model; None for a causal decoder."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM, "sequence-to-sequence"
    causal, masked = (
        names.get(config.model_type) for names in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    )
    # Many model types have an encoder and a decoder variant; the checkpoint's config names its own.
    if masked is None or getattr(config, "is_decoder", False) or causal in (config.architectures or ()):
        return None
    return AutoModelForMaskedLM, "masked"
