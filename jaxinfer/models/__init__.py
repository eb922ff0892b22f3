"""Model families, one file each, found by the `model_type` of a checkpoint's `config.json`.

A family's file exports `Config`, `Model`, `WEIGHT_MAP`, `IGNORED_WEIGHTS`, `kv_groups` and
`TINY_HF_CONFIG`. Files whose name starts with an underscore are not families.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def model_types() -> list[str]:
    """Returns every `model_type` that has a file here, sorted."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in names if not name.startswith("_"))


def load_model_module(model_type: str) -> ModuleType:
    """Imports the family's file; an error inside that file is raised as it is.

    Raises:
      ValueError: no file has this name.
    """
    if model_type not in model_types():
        raise ValueError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(model_types())}. "
            f"A family is added as one file in {__name__.replace('.', '/')}/"
        )
    return importlib.import_module(f"{__name__}.{model_type}")
