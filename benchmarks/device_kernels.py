"""Sections on single operations: bandwidth, and the time of attention and of matmul.

Every implementation in the operations' tables takes part, but for `reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_arrays import noise, random_held, random_weight, weight_bytes
from device_report import COPY_CASE
from device_timing import Calls, measured_copy, measured_flops
from device_worker import Lazy, Worker, WrongResultError
from jax import Array, lax

from jaxinfer.runner.kv_cache import default_page_size
from kernels import paged_attention, quantized_matmul
from kernels.paged_attention import AttentionMetadata, KVCache, QuantizedKV, kv_structs
from kernels.quantized_matmul import FORMATS, QFormat
from kernels.quantized_matmul import specs as matmul_specs

DISAGREEMENT = 0.02
"""Share of the largest result by which an implementation may differ from XLA's at timed shapes,
where both round to bfloat16."""

Group = dict[str, Callable[[], Calls]]
"""Calls that share arrays, by name: "call implementation"."""

_FORMAT_ORDER = ("int8", "int4", "w8a8", "fp8", "int4-g32", "uint4-g32", "nf4")


def bandwidth(worker: Worker) -> None:
    """Measures a copy, a read, and a large matrix product."""
    if worker.wants("bandwidth", COPY_CASE):
        with worker.case("bandwidth", COPY_CASE) as values:
            size = worker.sizes.copy_bytes
            if worker.memory_bytes is not None:
                size = min(size, worker.memory_bytes // 8)
            values.update(measured_copy(size // 4096 * 4096))
    if worker.wants("bandwidth", "bf16 product"):
        with worker.case("bandwidth", "bf16 product") as values:
            values["tflop_per_s"] = measured_flops(worker.sizes.flops_size) / 1e12


def attention(worker: Worker) -> None:
    """Times a decode step's attention with an 8B model's heads."""
    for label, group in attention_groups(worker):
        _time_group(worker, "attention", label, group)


def matmul(worker: Worker) -> None:
    """Times products of an 8B model's largest matrices, in every format and in bfloat16."""
    for label, group in matmul_groups(worker):
        _time_group(worker, "matmul", label, group)


def attention_groups(worker: Worker) -> Iterator[tuple[str, Group]]:
    """Yields (what they share, calls) of attention, the important ones first."""
    for batch, context in worker.sizes.decodes:
        group: Group = {}
        for dtype in ("bfloat16", "int8"):
            inputs = Lazy(partial(_decode_inputs, worker, batch, context, dtype))
            for name in _timed(paged_attention.IMPLEMENTATIONS[worker.platform]):
                make = partial(_decode_calls, worker, name, inputs)
                group[f"B={batch} S={context} {dtype} {name}"] = make
        yield f"B={batch} S={context}", group


def _timed(table: tuple[str, ...]) -> list[str]:
    """Implementations to time, the one that others are compared with first."""
    return sorted((name for name in table if name != "reference"), key=lambda name: name != "xla")


def _decode_inputs(
    worker: Worker, batch: int, context: int, dtype: str
) -> tuple[Array, list[tuple[KVCache, AttentionMetadata]], float]:
    """Queries; one cache with several page tables; the bytes of a call."""
    num_heads, num_kv_heads, head_dim = worker.sizes.heads
    page_size = default_page_size(worker.platform)
    pages = -(-context // page_size)
    row_bytes = num_kv_heads * (2 * head_dim * jnp.dtype(dtype).itemsize + 8 * (dtype == "int8"))
    num_bytes = batch * (context * row_bytes + 2 * 2 * num_heads * head_dim)
    count = max(2, min(worker.sizes.unroll, -(-worker.sizes.cached_bytes // num_bytes)))
    structs = kv_structs(
        worker.platform, dtype, 1 + count * batch * pages, page_size, num_kv_heads, head_dim
    )
    kv = jax.jit(partial(_random_cache, structs))()
    rng = np.random.default_rng(0)
    tables = 1 + rng.permutation(count * batch * pages).reshape(count, 1, batch, pages)
    variants = []
    for table in tables.astype(np.int32):
        metadata = AttentionMetadata(
            num_decodes=np.int32(batch),
            num_seqs=np.int32(batch),
            kv_lens=np.full(batch, context, np.int32),
            cu_q_lens=np.arange(batch + 1, dtype=np.int32),
            slot_mapping=table[:, :, -1] * page_size + (context - 1) % page_size,
            page_table=table,
            is_decode=True,
        )
        variants.append((kv, jax.device_put(metadata)))
    return _noise(batch, num_heads, head_dim), variants, num_bytes


def _noise(*shape: int) -> Array:
    """Two different bfloat16 arrays of a shape, stacked."""
    return jax.jit(lambda: noise((2, *shape), 7).astype(jnp.bfloat16))()


def _random_cache(structs: Any) -> KVCache:
    if not isinstance(structs, QuantizedKV):
        return jax.tree.map(random_held, structs)
    scales = 0.0137 * (1 + 0.1 * noise(structs.scales.shape, 2))  # codes' deviation is 73
    return QuantizedKV(jax.tree.map(random_held, structs.values), scales)


def _decode_calls(worker: Worker, implementation: str, inputs: Lazy[Any]) -> Calls:
    q, variants, num_bytes = inputs.get()
    attend = partial(
        paged_attention.attend,
        group=0,
        scale=worker.sizes.heads[-1] ** -0.5,
        platform=worker.platform,
        implementation=implementation,
    )
    return Calls(attend, q, variants, num_bytes)


def matmul_groups(worker: Worker) -> Iterator[tuple[str, Group]]:
    """Yields (what they share, calls) of matmul: bfloat16 first, then the important formats."""
    specs = _tiny_specs() if worker.sizes.is_tiny else matmul_specs.LARGE_SPECS
    known = FORMATS | matmul_specs.FILE_FORMATS
    matrices: dict[tuple[int, str], dict[str, matmul_specs.Spec]] = {}
    for name, spec in specs.items():
        fmt = next(key for key, value in known.items() if value == spec.fmt)
        matrix = name.removesuffix(f"-{fmt}-{spec.num_tokens}")
        order = [*_FORMAT_ORDER, fmt].index(fmt)
        matrices.setdefault((order, f"{matrix}-{fmt}"), {})[name] = spec
        dense = f"{matrix}-bf16"
        matrices.setdefault((-1, dense), {})[f"{dense}-{spec.num_tokens}"] = spec
    names = _timed(quantized_matmul.IMPLEMENTATIONS[worker.platform])
    for (order, label), calls in sorted(matrices.items(), key=lambda item: item[0]):
        fmt = None if order < 0 else next(iter(calls.values())).fmt
        weights = Lazy(partial(_weights, worker, next(iter(calls.values())), fmt))
        group: Group = {
            f"{name} {implementation}": partial(
                _matmul_calls, worker, spec.num_tokens, implementation, weights
            )
            for name, spec in calls.items()
            for implementation in (["dense"] if fmt is None else names)
        }
        yield label, group


def _tiny_specs() -> dict[str, matmul_specs.Spec]:
    return {
        f"tiny-up-{fmt}-{num_tokens}": matmul_specs.Spec(
            num_tokens, 256, 512, FORMATS[fmt], dtype="bfloat16"
        )
        for fmt in ("int8", "int4")
        for num_tokens in (1, 16)
    }


def _weights(worker: Worker, spec: matmul_specs.Spec, fmt: QFormat | None) -> list[Any]:
    """Several random matrices: too many for any cache."""
    _, struct = matmul_specs.abstract_inputs(spec, worker.platform)
    if fmt is None:
        struct = jax.ShapeDtypeStruct(struct.shape, jnp.bfloat16)
    make = jax.jit(partial(random_weight, struct, fmt))
    num_bytes = weight_bytes(struct)
    count = max(2, min(worker.sizes.unroll // 2, -(-worker.sizes.cached_bytes // num_bytes)))
    return [make(jnp.uint32(seed)) for seed in range(count)]


def _matmul_calls(
    worker: Worker, num_tokens: int, implementation: str, weights: Lazy[list[Any]]
) -> Calls:
    held = weights.get()
    out_features, in_features = held[0].shape
    function: Callable[..., Array] = _dense
    if implementation != "dense":
        function = partial(
            quantized_matmul.matmul,
            platform=worker.platform,
            implementation=implementation,
            out_dtype=jnp.float32,
        )
    activations = num_tokens * (2 * in_features + 4 * out_features)
    flops = 2.0 * num_tokens * out_features * in_features
    x, variants = _noise(num_tokens, in_features), [(weight,) for weight in held]
    return Calls(function, x, variants, weight_bytes(held[0]) + activations, flops)


def _dense(x: Array, weight: Array) -> Array:
    dimensions = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, dimensions, preferred_element_type=jnp.float32)


def _time_group(
    worker: Worker, section: str, label: str, group: Mapping[str, Callable[[], Calls]]
) -> None:
    """Compiles the calls of a group together, then times one after the other.

    Results are compared with those of `xla`, the first.
    """
    builders = {
        name: partial(_compile, worker, make)
        for name, make in group.items()
        if worker.wants(section, name)
    }
    built = worker.built(section, label, builders)
    results: dict[str, np.ndarray] = {}
    for name, compiled in built.items():
        if not worker.wants(section, name):
            continue
        with worker.case(section, name) as values:
            calls, program, one = compiled.get()
            call, _, implementation = name.rpartition(" ")
            result = np.asarray(one(*calls.args), np.float32)
            seconds = calls.seconds(program, worker.bytes_per_s)
            rate = calls.num_bytes / seconds
            values |= {"ms": seconds * 1e3, "gb_per_s": rate / 1e9}
            values["of_copy"] = rate / worker.bytes_per_s
            if calls.flops:
                values["tflop_per_s"] = calls.flops / seconds / 1e12
            if implementation == "xla":
                results[call] = result
            elif call in results:
                values["of_error"] = _disagreement(result, results[call])
                if not values["of_error"] <= DISAGREEMENT:
                    raise WrongResultError(f"differs from xla by {values['of_error']:.1%}")
    del built, builders  # and with them the arrays
    worker.free()


def _compile(worker: Worker, make: Callable[[], Calls]) -> tuple[Calls, Any, Any]:
    calls = make()
    one = jax.jit(calls.function).lower(*calls.args).compile()
    return calls, calls.compile(worker.bytes_per_s, worker.platform), one


def _disagreement(result: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference as a share of the largest result; NaN where either has one."""
    return float(np.abs(result - wanted).max() / np.abs(wanted).max())
