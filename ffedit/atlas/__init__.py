"""Embedded models: weights, tokenizers and cards. Their recipe is in `evaluations/atlas/`."""
