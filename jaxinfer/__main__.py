"""`python -m jaxinfer` is the `jaxinfer` command."""

from __future__ import annotations

import sys

from jaxinfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
