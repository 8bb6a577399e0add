"""Evaluation of an edit: efficacy, generalisation, specificity and side effects, before and after."""

import lazy_loader

# The names stand in `__init__.pyi`: the metrics can be named without torch, which takes seconds to import.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
