"""What should stop an edit from being shipped: guardrails, required scores, the verdict."""
