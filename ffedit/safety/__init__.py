"""Check an edit before it is shipped: guardrails, required scores, and that it took."""
