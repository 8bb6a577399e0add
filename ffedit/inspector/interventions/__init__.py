"""Change memories and see what follows."""
