"""The results of inspecting a model, a memory, a prompt or an edit."""
