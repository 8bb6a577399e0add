"""Form of the files in an edit's folder, checked without torch; `Edit.save` writes them, `Edit.load` reads them.

Two hashes protect them. The *fingerprint* is the edit's identity: factors, keys, values and facts. The *checksum*
covers the whole manifest, provenance included: an edit that was scored has the same fingerprint and another checksum.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ffedit.errors import EditError
from ffedit.facts.fact import show
from ffedit.facts.form import EVERY, INTEGER, NUMBER, TEXT, YES_OR_NO, Form, Maybe, check_form

FORMAT = 2
TENSORS, MANIFEST = "edit.safetensors", "manifest.json"
EDITS = "ffedit_edits"  # in a checkpoint: the folder of the edits that are in its weights
# Tensors of a memory: Δ in factors or dense, the keys, and their values.
FACTORED, DENSE = {"left", "right", "keys", "values"}, {"matrix", "keys", "values"}
ADDRESS = re.compile(r"\d{1,6}(\.\d{1,6})?", re.ASCII)
# Entries of a provenance that are read; others are free. Hashes do not prove the form: any writer can compute them.
_SCORES: Form = {EVERY: Maybe(NUMBER)}
_STATISTICS: Form = {
    "corpus": TEXT,
    "tokens!": INTEGER,
    "keys": INTEGER,
    "convergence": Maybe(NUMBER),
    "fingerprint": TEXT,
}
_SOLVED: Form = {
    **{"subject": TEXT, "tokens": [INTEGER], "probabilities": [NUMBER], "loss": [NUMBER], "contexts": [TEXT]},
    **{"from": TEXT},
}
_CONFIG: Form = {"key": {"fact_token": TEXT}, "value": {"steps": INTEGER, "target_probability": NUMBER}}
_PART: Form = {
    **{"method": TEXT, "model": TEXT, "chat": YES_OR_NO, "layers": [INTEGER], "fingerprint": TEXT},
    **{"subjects": {EVERY: [TEXT]}, "config": _CONFIG, "configs": {EVERY: _CONFIG}, "solved": [_SOLVED]},
}
PROVENANCE: Form = {
    **_PART,
    **{"base!": TEXT, "dtype": TEXT, "computed_in": TEXT, "averaged_in": TEXT, "after": [TEXT], "warnings": [TEXT]},
    "given": [TEXT],
    "matrices": {
        EVERY: {
            "parameter!": TEXT,
            "saved_as": TEXT,
            "transposed!": YES_OR_NO,
            "shape!": [INTEGER],
            "sample!": [NUMBER],
        }
    },
    **{"norms": {EVERY: NUMBER}, "norm_ratio": NUMBER, "division": {EVERY: [NUMBER]}, "versions": {EVERY: TEXT}},
    **{"statistics": {EVERY: _STATISTICS}, "inputs": {EVERY: TEXT}},
    **{"scores": {"before!": _SCORES, "after!": Maybe(_SCORES)}, "verdict": {"text!": TEXT}},
    "says": {"before": [Maybe(TEXT)], "after": [Maybe(TEXT)]},
    "parts": [{**_PART, "fingerprint!": TEXT}],
    "source": {"file!": TEXT, "package": Maybe(TEXT), "quantisation": [TEXT], "sha256!": TEXT},
    "gguf": [{"name!": TEXT, "was!": TEXT, "kind!": TEXT, "lost!": NUMBER}],
}


def check_content(provenance: Any, facts: int, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise a ValueError where a provenance does not have its form, or tensors are not those of an edit.

    `facts` is the number of facts, and `shapes` has the tensors' shapes by name: "4/left", or "4.7/keys" for expert 7
    of layer 4.
    """
    check_form(provenance, PROVENANCE, "provenance")
    addresses: dict[str, set[str]] = {}
    for name, shape in shapes.items():
        address, _, kind = name.partition("/")
        addresses.setdefault(address, set()).add(kind)
        if not ADDRESS.fullmatch(address):
            raise ValueError(f"{show(address)} is not a layer")
        if len(shape) != 2:
            raise ValueError(f"{show(name)} is {list(shape)}; a matrix was expected")
    if not addresses:
        raise ValueError("it changes nothing")
    for address, kinds in addresses.items():
        if kinds not in (FACTORED, DENSE):
            raise ValueError(f"layer {address} has the tensors {show(', '.join(sorted(kinds)))}")
        _check_shapes(address, {kind: shapes[f"{address}/{kind}"] for kind in kinds}, provenance)
    for part in (provenance, *provenance.get("parts", ())):
        for solved in part.get("solved", ()):
            lengths = {len(solved[name]) for name in ("tokens", "probabilities") if name in solved}
            if "tokens" in solved and (len(lengths) > 1 or not {"subject", "probabilities", "loss"} <= set(solved)):
                raise ValueError("provenance.solved does not say how each value was found")
    if any(len(answers) != facts for answers in provenance.get("says", {}).values() if answers):
        raise ValueError("provenance.says does not have an answer for each fact")
    scores = provenance.get("scores", {"before": {}, "after": None})
    if scores["after"] is not None and scores["after"].keys() != scores["before"].keys():
        raise ValueError("provenance.scores has other scores before than after")


def _check_shapes(address: str, shapes: Mapping[str, Sequence[int]], provenance: Mapping[str, Any]) -> None:
    """Raise a ValueError where the tensors of a memory do not fit each other or its subjects."""
    if "matrix" in shapes:
        rows, columns = shapes["matrix"]
    else:
        (rows, rank), (also_rank, columns) = shapes["left"], shapes["right"]
        if rank != also_rank:
            raise ValueError(f"{address}/left and {address}/right are factors of rank {rank} and {also_rank}")
    (keyed, keys), (valued, values) = shapes["keys"], shapes["values"]
    subjects = provenance.get("subjects", {}).get(address)
    if (keyed, valued) != (columns, rows) or keys != values or (subjects is not None and len(subjects) != keys):
        raise ValueError(f"keys and values of layer {address} do not fit a change of [{rows}, {columns}]")


def check_edit_folder(folder: Path) -> None:
    """Refuse a folder without a manifest, which holds no edit (EditError); `Edit.load` reads the files."""
    if not (folder / MANIFEST).is_file():
        reason = "holds no edit" if folder.exists() else "no such folder"
        if (folder / EDITS).is_dir():
            raise EditError(f"{folder}: an edited checkpoint, not an edit; give it as --model")
        raise EditError(f"{folder}: {reason} ({MANIFEST} and {TENSORS} were expected)")


def embedded(checkpoint: Path) -> list[Path]:
    """Return the folders of the edits in the weights of a checkpoint, oldest first; EditError where one is missing."""
    inside = checkpoint / EDITS
    names = sorted((path.name for path in inside.glob("*") if path.is_dir()), key=lambda name: (len(name), name))
    if names != [f"{i:03}" for i in range(len(names))]:
        raise EditError(f"{inside}: edits 000 to {len(names) - 1:03} were expected, found {', '.join(names)}")
    return [inside / name for name in names]


def checksum(manifest: Mapping[str, Any]) -> str:
    """Hash the manifest as it will be read back: JSON has no tuples, and only strings as keys."""
    plain = json.loads(json.dumps(manifest))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
