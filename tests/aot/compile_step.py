"""Compiles one step program of an 8B-shaped model for a chip and prints what the compiler says.

    python tests/aot/compile_step.py TARGET SCHEME KIND [--layers N] [--tensor-parallel N]

The program is the runner's own, from an abstract model: no weights are made. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import target as targets
from jax.sharding import Mesh, NamedSharding

from jaxinfer.models import llama
from jaxinfer.nn.context import ModelContext
from jaxinfer.quantization import SCHEMES
from jaxinfer.runner.compile_watch import CompileWatch
from jaxinfer.runner.kv_cache import CacheSpec, default_page_size
from jaxinfer.runner.loader import abstract_weights, make_abstract_model
from jaxinfer.runner.model_runner import ModelRunner
from jaxinfer.runner.runner_config import RunnerConfig
from jaxinfer.testing import LLAMA_8B
from kernels import device
from kernels.paged_attention import kv_partition

MAX_MODEL_LEN = 8192
NUM_SEQS = 16
NUM_TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=targets.TARGETS)
    parser.add_argument("scheme", choices=["bf16", *SCHEMES])
    parser.add_argument("kind", choices=["decode", "ragged"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    args = parser.parse_args()
    targets.prepare()
    runner = make_runner(args.target, args.scheme, args.layers, args.tensor_parallel)
    rung = {"decode": NUM_SEQS, "ragged": NUM_TOKENS}[args.kind]
    with device.assume(device.KNOWN_DEVICES[args.target]):
        begin = time.perf_counter()
        lowered = runner.lower(args.kind, rung)
        traced = time.perf_counter()
        compiled = lowered.compile()
        end = time.perf_counter()
    memory = compiled.memory_analysis()
    report = {
        "program": f"{args.kind}[{rung}]",
        "trace_s": round(traced - begin, 2),
        "compile_s": round(end - traced, 2),
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "copies": targets.copies(compiled.as_text(), local_parts(runner)),
        "kernels": sorted(set(kernel_calls(compiled.as_text()))),
    }
    print(json.dumps(report))


def make_runner(target: str, scheme: str, num_layers: int, tensor_parallel: int) -> ModelRunner:
    """Returns a runner over an abstract model on a target's devices."""
    chips = np.array(targets.devices(target)[:tensor_parallel])
    platform = device.KNOWN_DEVICES[target].platform
    context = ModelContext(
        mesh=Mesh(chips.reshape(1, -1), ("data", "tensor")),
        platform=platform,
        dtype=np.dtype(jnp.bfloat16),
        weight_dtype=np.dtype(jnp.bfloat16),
        quant=SCHEMES.get(scheme),
    )
    config = llama.Config.from_hf(LLAMA_8B | {"num_hidden_layers": num_layers})
    model = make_abstract_model(llama, config, context)
    abstract_weights(model, llama, {})
    page_size = default_page_size(platform)
    runner_config = RunnerConfig(
        max_num_seqs=NUM_SEQS,
        max_num_batched_tokens=NUM_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        decode_steps=1,
        cache=CacheSpec(
            platform=platform,
            dtype=np.dtype(jnp.bfloat16),
            num_layers=num_layers,
            num_kv_heads=model.num_cache_kv_heads,
            head_dim=config.head_dim,
            page_size=page_size,
            num_shards=tensor_parallel,
        ),
        num_pages=1 + NUM_SEQS * 1024 // page_size,
        num_groups=1,
    )
    return ModelRunner(model, runner_config, config.vocab_size, CompileWatch())


def local_parts(runner: ModelRunner) -> list[jax.ShapeDtypeStruct]:
    """Returns one device's part of each array of one layer's cache."""
    config = runner.config
    mesh = runner.mesh
    layer = config.cache.layer(config.num_pages)
    return jax.tree.leaves(
        jax.tree.map(
            lambda array, spec: jax.ShapeDtypeStruct(
                NamedSharding(mesh, spec).shard_shape(array.shape), array.dtype
            ),
            layer,
            kv_partition(layer, "tensor"),
        )
    )


def kernel_calls(hlo: str) -> list[str]:
    """Returns the targets of an optimized program's custom calls."""
    return re.findall(r'custom_call_target="([^"]+)"', hlo)


if __name__ == "__main__":
    main()
