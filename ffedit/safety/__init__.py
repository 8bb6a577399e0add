"""Check an edit before it is shipped: guardrails, required scores, the verdict."""
