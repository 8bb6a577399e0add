"""Write facts: compute keys and values, solve for the smallest change, return it as an `Edit`."""
