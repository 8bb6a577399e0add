"""Save an interrupted pass over a text, so that the next one resumes it and ends with the same bits.

The sums are consistent between two batches only, so an interrupt (Ctrl-C) is delayed until the current batch is done.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ffedit.algebra.key_moments import KeyMomentsFitter
from ffedit.errors import EditError
from ffedit.files import cache
from ffedit.model.memory import Address


def save_partial_statistics(path: Path, fitters: Mapping[Address, KeyMomentsFitter], seconds: float) -> None:
    """Save the sums so far; do nothing if the cache cannot be written."""
    tensors: dict[str, Tensor] = {}
    counts = {}
    for address, fitter in fitters.items():
        tensors |= {f"{address}/{i}": half.cpu() for i, half in enumerate(fitter.halves)}
        seen = fitter.left_out, fitter.sinks, fitter.median
        counts[str(address)] = [fitter.batches, *seen, *fitter.counts, *fitter.reached]
        if fitter.probes is not None:
            tensors[f"{address}/probes"] = fitter.probes.cpu()
    about = {"pass": json.dumps({"counts": counts, "seconds": seconds})}
    cache.write(path, lambda temporary: save_file(tensors, temporary, metadata=about))


def resume_statistics(path: Path, fitters: Mapping[Address, KeyMomentsFitter]) -> float:
    """Restore into `fitters` what `save_partial_statistics` saved, if anything; return the seconds spent on it.

    Raises:
        EditError: the file is damaged.
    """
    if not path.exists():
        return 0.0
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["pass"])
            names = set(file.keys())
            for address, fitter in fitters.items():
                fitter.batches, fitter.left_out, fitter.sinks, fitter.median, *counts = about["counts"][str(address)]
                fitter.counts, fitter.reached = counts[:2], counts[2:]
                fitter.halves = [file.get_tensor(f"{address}/{i}") for i in range(min(2, fitter.batches))]
                fitter.probes = file.get_tensor(probes) if (probes := f"{address}/probes") in names else None
            return float(about["seconds"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise EditError(f"{path}: not an unfinished pass of ffedit's ({error}); delete it") from error
