"""Loading a model by name, finding its parts and verifying them."""
