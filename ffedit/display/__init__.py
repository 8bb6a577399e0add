"""What a person sees: terminal, figures, pages."""
