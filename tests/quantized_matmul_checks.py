"""What every implementation of quantized matmul must pass; the same bodies for all of them."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweep import IN_SWEEP

from kernels import device, quantized_matmul
from kernels.quantized_matmul import QTensor, prepare, specs
from kernels.quantized_matmul.format import CANONICAL


def _is_in_sweep(name: str) -> bool:
    """Whether it adds little: "down" is "up" with a longer loop, which takes longer to trace."""
    if specs.LARGE_SPECS[name].fmt in specs.FILE_FORMATS.values():
        return True  # test_quantized_matmul_formats.py lowers each at a smaller size
    return "down" in name and not name.endswith("-16")


LOWERED = [
    *specs.SPECS,
    *[
        pytest.param(name, marks=IN_SWEEP if _is_in_sweep(name) else ())
        for name in specs.LARGE_SPECS
    ],
]


def run(x, w: QTensor, platform: str, implementation: str, on=None, interpret=None):
    """Runs one implementation in float32 out, interpreted as if on a device of `KNOWN_DEVICES`."""
    with (
        device.assume(device.KNOWN_DEVICES[on]) if on else nullcontext(),
        device.interpreted(interpret) if interpret is not None else nullcontext(),
    ):
        call = jax.jit(
            lambda x, w: quantized_matmul.matmul(
                x,
                w,
                platform=platform,
                implementation=implementation,
                out_dtype=jnp.float32,
            )
        )
        return np.asarray(call(x, w))


def check_against_reference(
    spec: specs.Spec, platform: str, implementation: str, on=None, interpret=None
) -> None:
    """In float32, the implementation's result is the reference's."""
    x, w = specs.make_inputs(dataclasses.replace(spec, dtype="float32"), platform=platform)
    wanted = run(x, prepare(w, CANONICAL), "cpu", "reference")
    result = run(x, w, platform, implementation, on, interpret)
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=2e-5)


def check_rounding(
    spec: specs.Spec, platform: str, implementation: str, on=None, interpret=None
) -> None:
    """In bfloat16 the error is that of rounding x's products, never that of rounding sums."""
    x, w = specs.make_inputs(dataclasses.replace(spec, dtype="bfloat16"), platform=platform)
    wanted = run(x, prepare(w, CANONICAL), "cpu", "reference")
    result = run(x, w, platform, implementation, on, interpret)
    # Each product may be off by 2**-8 of itself: the errors add up like a random walk.
    bound = 4 * 2.0**-8 / np.sqrt(spec.in_features)
    size = np.sqrt(
        np.square(np.asarray(x, np.float32)).sum(1)[:, None]
        * np.square(np.asarray(quantized_matmul.dequantize(w))).sum(1)[None]
    )
    assert (np.abs(result - wanted) <= bound * size + 1e-6).all()


def check_rows_are_independent(
    spec: specs.Spec, platform: str, implementation: str, on=None, interpret=None
) -> None:
    """A row's result does not depend on what the other rows hold, NaN included."""
    x, w = specs.make_inputs(dataclasses.replace(spec, dtype="float32"), platform=platform)
    whole = run(x, w, platform, implementation, on, interpret)
    poisoned = run(x.at[1:].set(jnp.nan), w, platform, implementation, on, interpret)
    np.testing.assert_array_equal(poisoned[0], whole[0])
