"""Engines whose programs one process of a run of the tests compiles, and the others load.

Nearly all that a tiny engine costs is tracing and compiling, and every worker of pytest-xdist, and
every server in a process of its own, would do that again for the same few.
"""

import os
from unittest import mock

import jax

from jaxinfer import compilation_cache, startup


def assemble(*arguments):
    """As `assemble_engine`, with the programs that the run has already."""
    with mock.patch.object(startup, "program_store", _store):
        return startup.assemble_engine(*arguments)


def _store(runner):
    # Not what jax itself keeps: it looks once where that is.
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", os.environ["JAXINFER_TEST_PROGRAMS"])
    try:
        return compilation_cache.program_store(runner)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
