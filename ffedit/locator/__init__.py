"""Find the layer that holds a fact: causal tracing (Meng et al. 2022, arXiv 2202.05262, section 2)."""

from ffedit.locator.result import Kind, Trace, TraceSet, best_layer, span_of
from ffedit.locator.trace import locate, noise_scale

__all__ = ["Kind", "Trace", "TraceSet", "best_layer", "locate", "noise_scale", "span_of"]
