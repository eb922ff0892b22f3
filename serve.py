"""`python serve.py [flags]` is `jaxinfer serve [flags]`."""

from __future__ import annotations

import sys

from jaxinfer.cli import serve_main

if __name__ == "__main__":
    sys.exit(serve_main())
