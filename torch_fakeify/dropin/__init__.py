"""Puts our describer and converter in place of torch's, and takes them out again.

After `install`, every new ``FakeTensorMode`` has our converter; existing modes retain
theirs. Each module that holds one of torch's classes by name gets ours; a module that is imported
later gets ours too, since the module that defines them holds ours. `uninstall` looks at all modules
again, so also those are as they would be without.

``TORCH_FAKEIFY_DROPIN=1`` in the environment has ``import torch_fakeify`` install it.
"""

from __future__ import annotations

from .patching import Replaced as Replaced
from .patching import install as install
from .patching import installed as installed
from .patching import is_installed as is_installed
from .patching import replaced as replaced
from .patching import uninstall as uninstall

__all__ = [
    "Replaced",
    "install",
    "installed",
    "is_installed",
    "replaced",
    "uninstall",
]
