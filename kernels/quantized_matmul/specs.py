"""Named, realistic calls of quantized matmul: the same for tests, tuning and bench."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kernels.quantized_matmul import cpu, matmul
from kernels.quantized_matmul.format import E2M1, FORMATS, NF4, QFormat, QTensor, prepare
from kernels.quantized_matmul.rounding import quantize


@dataclass(frozen=True)
class Spec:
    """One call: `x[num_tokens, in_features]` by a weight `[out_features, in_features]`.

    Attributes:
      fmt: what the weight is quantized to.
      dtype: of x.
      has_perm: columns are permuted, as in act-order checkpoints.
    """

    num_tokens: int
    out_features: int
    in_features: int
    fmt: QFormat
    dtype: str = "float32"
    has_perm: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes that must move: the weight, x and the result once."""
        rows = self.num_tokens * (self.in_features + self.out_features)
        bits = 4 if self.fmt.code.endswith("int4") else 8
        weights = self.out_features * self.in_features
        groups = weights // (self.fmt.group_size or self.in_features) * (1 + self.fmt.has_offset)
        scale_bytes = groups * jnp.dtype(self.fmt.scale_dtype).itemsize
        return rows * jnp.dtype(self.dtype).itemsize + weights * bits // 8 + scale_bytes

    def prepare(
        self, platform: str, implementation: str
    ) -> tuple[Callable[..., Array], tuple[Array, QTensor]]:
        """Returns `matmul` as a function of arrays, and arrays for it, laid out as engines do."""
        call = partial(matmul, platform=platform, implementation=implementation)
        x, w = make_inputs(self, platform=platform)
        if implementation == "cpu":
            w = prepare(w, cpu.best_layout(w))
        return call, (x, w)


FILE_FORMATS: dict[str, QFormat] = {
    "int8-g16": QFormat("int8", 16),  # Q6_K
    "int8-g32-f16": QFormat("int8", 32, scale_dtype="float16"),  # Q5_0, Q8_0
    "int8-offset-g32": QFormat("int8", 32, has_offset=True),  # Q5_K
    "int8-offset-g32-f16": QFormat("int8", 32, has_offset=True, scale_dtype="float16"),  # Q5_1
    "int8-offset-g128": QFormat("int8", 128, has_offset=True),  # GPTQ of 8 bits, HQQ
    "fp8-g128": QFormat("fp8", 128),
    "int4-f16": QFormat("int4", 128, scale_dtype="float16"),  # symmetric GPTQ
    "int4-g16": QFormat("int4", 16),  # Q3_K
    "int4-g32-f16": QFormat("int4", 32, scale_dtype="float16"),  # Q4_0
    "uint4": QFormat("uint4", 128, has_offset=True),  # AWQ, GPTQ
    "uint4-g16": QFormat("uint4", 16, has_offset=True),  # Q2_K
    "uint4-g32-f16": QFormat("uint4", 32, has_offset=True, scale_dtype="float16"),  # Q4_1
    "mxfp4": QFormat("uint4", 32, codebook=E2M1, scale_dtype="bfloat16"),
}
"""What checkpoints hold besides FORMATS: int8 (also bitsandbytes', w8a8), fp8, nf4, Q4_K."""

_SMALL = partial(Spec, out_features=384, in_features=512)
_LLAMA_8B_UP = partial(Spec, out_features=28672, in_features=4096, dtype="bfloat16")
_LLAMA_8B_DOWN = partial(Spec, out_features=4096, in_features=14336, dtype="bfloat16")

SPECS: dict[str, Spec] = {
    "int8-decode-1": _SMALL(1, fmt=FORMATS["int8"]),
    "int8-decode-16": _SMALL(16, fmt=FORMATS["int8"], dtype="bfloat16"),
    "int8-g128-decode-8": _SMALL(8, fmt=FORMATS["int8-g128"]),
    "int8-g16-decode-4": _SMALL(4, fmt=QFormat("int8", 16, scale_dtype="float16")),
    "int8-offset-g32-decode-8": _SMALL(8, fmt=FILE_FORMATS["int8-offset-g32"]),
    "int8-offset-g128-prefill-70": _SMALL(
        70, fmt=FILE_FORMATS["int8-offset-g128"], dtype="bfloat16"
    ),
    "int8-prefill-200": _SMALL(200, fmt=FORMATS["int8"]),
    "int8-perm-decode-3": _SMALL(3, fmt=FORMATS["int8-g128"], has_perm=True),
    "w8a8-decode-16": _SMALL(16, fmt=FORMATS["w8a8"]),
    "w8a8-g128-prefill-100": _SMALL(100, fmt=QFormat("int8", 128, activations="int8")),
    "fp8-decode-8": _SMALL(8, fmt=FORMATS["fp8"]),
    "fp8-g128-prefill-64": _SMALL(64, fmt=QFormat("fp8", 128), dtype="bfloat16"),
    "int4-decode-1": _SMALL(1, fmt=FORMATS["int4"]),
    "int4-decode-64": _SMALL(64, fmt=FORMATS["int4"], dtype="bfloat16"),
    "int4-g32-decode-8": _SMALL(8, fmt=FILE_FORMATS["int4-g32-f16"]),
    "int4-g16-decode-2": _SMALL(2, fmt=QFormat("int4", 16)),
    "int4-row-decode-4": _SMALL(4, fmt=QFormat("int4")),
    "int4-prefill-150": _SMALL(150, fmt=FORMATS["int4"]),
    "uint4-g32-decode-8": _SMALL(8, fmt=FORMATS["uint4-g32"]),
    "uint4-g32-prefill-70": _SMALL(70, fmt=FORMATS["uint4-g32"], dtype="bfloat16"),
    "uint4-g64-decode-5": _SMALL(5, fmt=QFormat("uint4", 64, has_offset=True)),
    "nf4-decode-8": _SMALL(8, fmt=FORMATS["nf4"]),
    "nf4-g128-prefill-90": _SMALL(90, fmt=QFormat("uint4", 128, codebook=NF4)),
    "smollm2-qkv-int4-g32-decode-2": Spec(2, 960, 576, FORMATS["int4-g32"]),
    "smollm2-down-int8-prefill-33": Spec(33, 576, 1536, FORMATS["int8"]),
}
"""Small enough to interpret."""

LARGE_SPECS: dict[str, Spec] = {
    f"llama8b-{name}-{fmt}-{num_tokens}": make(num_tokens, fmt=FORMATS[fmt])
    for name, make in (("up", _LLAMA_8B_UP), ("down", _LLAMA_8B_DOWN))
    for fmt in ("int8", "w8a8", "fp8", "int4", "int4-g32", "uint4-g32", "nf4")
    for num_tokens in (1, 16, 64, 512)
} | {
    f"llama8b-up-{name}-{num_tokens}": _LLAMA_8B_UP(num_tokens, fmt=fmt)
    for name, fmt in FILE_FORMATS.items()
    for num_tokens in (16, 512)
}
"""One layer of an 8B model: what is compiled for chips, tuned and timed."""


def make_inputs(spec: Spec, seed: int = 0, platform: str = "cpu") -> tuple[Array, QTensor]:
    """Returns random `(x, w)` of a spec, the weight laid out for a platform."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((spec.num_tokens, spec.in_features), np.float32)
    weight = rng.standard_normal((spec.out_features, spec.in_features), np.float32)
    weight *= spec.in_features**-0.5
    w = quantize(jnp.asarray(weight), spec.fmt)
    if spec.has_perm:
        perm = jnp.asarray(rng.permutation(spec.in_features), jnp.int32)
        w = dataclasses.replace(w, perm=perm)
    return jnp.asarray(x, spec.dtype), prepare(w, platform)


def abstract_inputs(spec: Spec, platform: str) -> tuple[jax.ShapeDtypeStruct, QTensor]:
    """Returns the shapes and dtypes of `make_inputs`: enough to compile, made in no time."""

    def make() -> tuple[Array, QTensor]:
        weight = jnp.zeros((spec.out_features, spec.in_features), jnp.float32)
        w = prepare(quantize(weight, spec.fmt), platform)
        if spec.has_perm:
            w = dataclasses.replace(w, perm=jnp.zeros(spec.in_features, jnp.int32))
        return jnp.zeros((spec.num_tokens, spec.in_features), spec.dtype), w

    return jax.eval_shape(make)
