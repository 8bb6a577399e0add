"""Interventions on memories, and their effects on predictions."""
