"""Evaluation of an edit: efficacy, generalisation, specificity and side effects, before and after."""

import lazy_loader

# `__init__.pyi` lists the names, so that metrics can be named without importing torch, which takes seconds.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
