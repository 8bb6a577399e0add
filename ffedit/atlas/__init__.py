"""The embedded models: weights, tokenizers and cards. Their recipe is in `evaluations/atlas/`."""
