"""Write facts: compute keys and values, solve for the smallest change, return it as an `Edit`."""

import lazy_loader

# The names stand in `__init__.pyi`: numbers and methods can be listed without torch, which takes seconds.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
