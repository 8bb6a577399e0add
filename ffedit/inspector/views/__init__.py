"""What an inspection returns: a model, a memory, a prompt, an edit."""
