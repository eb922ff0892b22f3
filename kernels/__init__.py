"""Accelerated operations: arrays in, arrays out. Imports only jax, numpy and the standard library.

Knows no request, no configuration and no flax. Each operation is a sub-package that picks its
implementation by platform (`kernels.dispatch`): `paged_attention`.
"""
