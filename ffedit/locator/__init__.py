"""Find the layer that holds a fact: causal tracing (Meng et al. 2022, arXiv 2202.05262, section 2)."""

from ffedit.locator.trace import Kind, Trace, TraceSet, locate, noise_scale

__all__ = ["Kind", "Trace", "TraceSet", "locate", "noise_scale"]
