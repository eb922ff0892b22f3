"""Makes sure that the package `kernels` is ours: another distribution has the same name."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def check_kernels_package() -> None:
    """Looks at where `kernels` would be imported from; imports nothing.

    Raises:
      ImportError: it is missing, or another distribution's files took its place.
    """
    spec = importlib.util.find_spec("kernels")
    found = None if spec is None or spec.origin is None else Path(spec.origin).parent
    if found is None:
        raise ImportError("jaxinfer's package `kernels` is missing; reinstall jaxinfer")
    if not (found / "dispatch.py").is_file() or any(found.parent.glob("kernels-*.dist-info")):
        raise ImportError(
            f"another distribution named `kernels` took the place of jaxinfer's package at {found};"
            " run `pip uninstall kernels` and reinstall jaxinfer, or use separate environments"
        )
