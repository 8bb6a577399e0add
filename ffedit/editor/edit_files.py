"""The files of an edit's folder, read and checked without torch.

Two hashes protect them. The *fingerprint* is the edit's identity: factors, keys, values and facts. The *checksum*
covers the whole manifest, provenance included: an edit that was scored has the same fingerprint and another checksum.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, deserialize

from ffedit.errors import EditError, FactError, brief
from ffedit.facts.fact import Fact, show
from ffedit.facts.form import EVERY, INTEGER, NUMBER, OBJECT, TEXT, YES_OR_NO, Form, Maybe, check_form

FORMAT = 2
TENSORS, MANIFEST = "edit.safetensors", "manifest.json"
EDITS = "ffedit_edits"  # in a checkpoint: the folder of the edits that are in its weights
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ADDRESS = re.compile(r"\d{1,6}(\.\d{1,6})?", re.ASCII)
# What is read of a provenance; all else in it is free. Whoever writes an edit signs it, so hashes vouch for no form.
_SCORES: Form = {EVERY: Maybe(NUMBER)}
_MOVED: Form = {"moved!": NUMBER, "bound!": NUMBER}
_STATISTICS: Form = {
    "corpus": TEXT,
    "tokens!": INTEGER,
    "keys": INTEGER,
    "convergence": Maybe(NUMBER),
    "fingerprint": TEXT,
}
_GUARANTEE: Form = {
    **{"directions!": INTEGER, "of": INTEGER, "share!": NUMBER, "text!": _MOVED},
    "kept!": {"keys!": INTEGER, **_MOVED},
}
_SOLVED: Form = {
    **{"subject": TEXT, "tokens": [INTEGER], "probabilities": [NUMBER], "loss": [NUMBER], "contexts": [TEXT]},
    **{"from": TEXT},
}
_PART: Form = {
    **{"method": TEXT, "model": TEXT, "chat": YES_OR_NO, "layers": [INTEGER], "fingerprint": TEXT},
    **{"subjects": {EVERY: [TEXT]}, "config": OBJECT, "configs": {EVERY: OBJECT}, "solved": [_SOLVED]},
}
PROVENANCE: Form = {
    **_PART,
    **{"base!": TEXT, "dtype": TEXT, "computed_in": TEXT, "after": [TEXT], "warnings": [TEXT]},
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
    **{"statistics": {EVERY: _STATISTICS}, "guarantee": {EVERY: _GUARANTEE}, "inputs": {EVERY: TEXT}},
    **{"scores": {"before!": _SCORES, "after!": Maybe(_SCORES)}, "verdict": {"text!": TEXT}},
    "says": {"before": [Maybe(TEXT)], "after": [Maybe(TEXT)]},
    "parts": [{**_PART, "fingerprint!": TEXT}],
    "source": {"file!": TEXT, "package": Maybe(TEXT), "quantisation": [TEXT], "sha256!": TEXT},
    "gguf": [{"name!": TEXT, "was!": TEXT, "kind!": TEXT, "lost!": NUMBER}],
}


class Numbers(NamedTuple):
    """A tensor of an edit: the name of its dtype, its shape, and its bytes."""

    dtype: str
    shape: list[int]
    content: bytes

    def array(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the numbers in float64."""
        if self.dtype == "bfloat16":  # the upper half of a float32, which numpy has not
            upper = np.frombuffer(self.content, np.uint16).astype(np.uint32) << 16
            return upper.view(np.float32).astype(np.float64).reshape(self.shape)
        return np.frombuffer(self.content, self.dtype).astype(np.float64).reshape(self.shape)


class Described(ABC):
    """What an edit says of itself, in memory and on disk."""

    facts: tuple[Fact, ...]
    provenance: Mapping[str, Any]

    @property
    @abstractmethod
    def layers(self) -> list[int]:
        """Return the layers that change, in ascending order."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return the edit's identity (`digest`)."""

    @property
    def base(self) -> str:
        """Fingerprint of the model that the edit was computed on."""
        return str(self.provenance["base"])

    @property
    def in_chat(self) -> bool:
        """True if all of the edit was computed inside the model's chat template."""
        parts = self.provenance.get("parts", [self.provenance])
        return all(part.get("chat", False) for part in parts)

    @property
    def says(self) -> list[tuple[str | None, str | None]]:
        """By fact, what the model said to its prompt without the edit and with it; None where it was not measured."""
        said = self.provenance.get("says", {})
        before, after = (said.get(side) or [None] * len(self.facts) for side in ("before", "after"))
        return list(zip(before, after, strict=True))


@dataclass(frozen=True)
class SavedEdit(Described):
    """An edit on disk, without its tensors.

    `numbers` are the tensors by name, such as "4/left" or "4.7/keys" for expert 7 of layer 4; the rest is as of `Edit`.
    """

    facts: tuple[Fact, ...]
    provenance: Mapping[str, Any]
    numbers: Mapping[str, Numbers]

    @classmethod
    def read(cls, folder: Path) -> SavedEdit:
        """Read an edit; EditError where there is none, or it is damaged, changed by hand, or of another format."""
        check_edit(folder)
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                raise EditError(f"{folder}: an edit of format {show(manifest['format'])}; this version reads {FORMAT}")
            raw = dict(deserialize(_content(folder / TENSORS)))  # type: ignore[no-untyped-call]
            numbers = {name: Numbers(DTYPES[at["dtype"]], at["shape"], bytes(at["data"])) for name, at in raw.items()}
            edit = cls(tuple(Fact.from_dict(fact) for fact in manifest["facts"]), manifest["provenance"], numbers)
            edit.check_form()
            same_numbers = manifest["fingerprint"] == edit.fingerprint()
            same_manifest = manifest.pop("checksum") == checksum(manifest)
        except (
            *(OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, FactError),
            RecursionError,  # brackets in brackets, thousands deep
        ) as error:
            raise EditError(f"{folder}: the edit is damaged or foreign ({brief(error)}); make it anew") from error
        if not same_numbers:
            raise EditError(f"{folder}: numbers or facts were changed after the edit was saved; make it anew")
        if not same_manifest:
            raise EditError(f"{folder}: {MANIFEST} was changed after the edit was saved; make the edit anew")
        return edit

    def fingerprint(self) -> str:
        """Return the edit's identity (`digest`)."""
        return digest(self.facts, self.numbers.items())

    def check_form(self) -> None:
        """Raise a ValueError where the tensors are not those of an edit, or the provenance is not of its form."""
        about: Mapping[str, Any] = self.provenance
        form = PROVENANCE
        if isinstance(about, Mapping) and "tokens" in (about.get("statistics") or ()):  # early edits: of one layer
            form = {**PROVENANCE, "statistics": _STATISTICS}
        check_form(about, form, "provenance")
        if not self.numbers:
            raise ValueError("it changes nothing")
        for address in {name.partition("/")[0] for name in self.numbers}:
            if not ADDRESS.fullmatch(address):
                raise ValueError(f"{show(address)} is not a layer")
            self._check_shapes(address, about.get("subjects", {}).get(address))
        for part in (about, *about.get("parts", ())):
            for solved in part.get("solved", ()):
                lengths = {len(solved[name]) for name in ("tokens", "probabilities") if name in solved}
                if "tokens" in solved and (len(lengths) > 1 or not {"subject", "probabilities", "loss"} <= set(solved)):
                    raise ValueError("provenance.solved does not say how each value was found")
        if any(len(said) != len(self.facts) for said in about.get("says", {}).values() if said):
            raise ValueError("provenance.says does not have an answer for each fact")
        scores = about.get("scores", {"before": {}, "after": None})
        if scores["after"] is not None and scores["after"].keys() != scores["before"].keys():
            raise ValueError("provenance.scores has other scores before than after")

    def _check_shapes(self, address: str, subjects: list[str] | None) -> None:
        """Raise a ValueError where the tensors of a memory do not fit each other; KeyError where one is missing."""

        def shape(name: str) -> list[int]:
            sides = self.numbers[f"{address}/{name}"].shape
            if len(sides) != 2:
                raise ValueError(f"{address}/{name} is {sides}; a matrix was expected")
            return sides

        if f"{address}/matrix" in self.numbers:
            rows, columns = shape("matrix")
        else:
            (rows, rank), (also_rank, columns) = shape("left"), shape("right")
            if rank != also_rank:
                raise ValueError(f"{address}/left and {address}/right are factors of rank {rank} and {also_rank}")
        (keyed, keys), (valued, values) = shape("keys"), shape("values")
        if (keyed, valued) != (columns, rows) or keys != values or (subjects is not None and len(subjects) != keys):
            raise ValueError(f"keys and values of layer {address} do not fit a change of [{rows}, {columns}]")

    @property
    def addresses(self) -> list[str]:
        """Layer, or layer and expert, of each memory that changes, in ascending order."""
        names = {name.partition("/")[0] for name in self.numbers}
        return sorted(names, key=lambda address: [int(number) for number in address.split(".")])

    @property
    def layers(self) -> list[int]:
        """Return the layers that change."""
        return sorted({int(address.partition(".")[0]) for address in self.addresses})

    @property
    def rank(self) -> int:
        """Rank of the largest update, as of `Edit`."""
        left = [entry.shape[1] for name, entry in self.numbers.items() if name.endswith("/left")]
        dense = [min(entry.shape) for name, entry in self.numbers.items() if name.endswith("/matrix")]
        return max(left + dense, default=0)

    def norms(self) -> dict[str, float]:
        """Compute ‖Δ‖ (Frobenius) by address."""
        norms = {}
        for address in self.addresses:
            if (matrix := self.numbers.get(f"{address}/matrix")) is not None:
                norms[address] = float(np.linalg.norm(matrix.array()))
            else:
                left, right = (self.numbers[f"{address}/{side}"].array() for side in ("left", "right"))
                norms[address] = float(np.sqrt(max(0.0, ((left.T @ left) * (right @ right.T)).sum())))
        return norms


def _content(file: Path) -> bytes:
    """Read a file; a ValueError for what is none, such as a link to a device without an end."""
    if not file.is_file():
        raise ValueError(f"no file {file.name}")
    return file.read_bytes()


def check_edit(folder: Path) -> None:
    """Refuse a folder without a manifest, which holds no edit (EditError); `SavedEdit.read` reads the files."""
    if not (folder / MANIFEST).is_file():
        raise EditError(f"{folder}: holds no edit ({MANIFEST} and {TENSORS} were expected)")


def embedded(checkpoint: Path) -> list[Path]:
    """Return the folders of the edits in the weights of a checkpoint, oldest first; EditError where one is missing."""
    inside = checkpoint / EDITS
    names = sorted((path.name for path in inside.glob("*") if path.is_dir()), key=lambda name: (len(name), name))
    if names != [f"{i:03}" for i in range(len(names))]:
        raise EditError(f"{inside}: edits 000 to {len(names) - 1:03} were expected, found {', '.join(names)}")
    return [inside / name for name in names]


def digest(facts: Sequence[Fact], numbers: Iterable[tuple[str, Numbers]]) -> str:
    """Hash facts, changes as they are factored, keys and values to 16 hexadecimal digits."""
    hashed = hashlib.sha256(json.dumps([fact.to_dict() for fact in facts]).encode())
    for name, tensor in sorted(numbers):
        hashed.update(f"{name}{list(tensor.shape)}torch.{tensor.dtype}".encode())
        hashed.update(tensor.content)
    return hashed.hexdigest()[:16]


def checksum(manifest: Mapping[str, Any]) -> str:
    """Hash the manifest as it will be read back: JSON has no tuples, and only strings as keys."""
    plain = json.loads(json.dumps(manifest))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
