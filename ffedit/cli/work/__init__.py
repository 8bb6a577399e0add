"""Work of the commands after their options are parsed and their paths checked: all that needs torch.

A module here imports what it needs at its top, and the commands import none of them. They call the functions that
`__init__.pyi` names; the first call imports the function's module, and torch with it, which takes seconds.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
