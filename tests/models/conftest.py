"""Runs tiny models over shuffled pages: the engine's contract without the engine."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from models.oracle_cases import tensor

from jaxinfer.models import load_model_module
from jaxinfer.nn.context import ModelContext
from jaxinfer.runner.loader import expected_shapes, load_weights, make_abstract_model
from kernels.paged_attention import AttentionMetadata, kv_partition, kv_structs

PAGE_SIZE = 4
PAGES_PER_ROW = 16


def make_context(tensor_parallel=1, dtype=np.float32):
    """Returns a context on the first CPU devices."""
    devices = np.array(jax.devices()[:tensor_parallel]).reshape(1, tensor_parallel)
    mesh = Mesh(devices, ("data", "tensor"))
    dtype = np.dtype(dtype)
    return ModelContext(mesh, "cpu", dtype=dtype, weight_dtype=dtype, precision="highest")


def load_model(hf_config, context):
    """Returns the model of a `config.json`, filled with `oracle_cases.tensor` weights."""
    module = load_model_module(hf_config["model_type"])
    model = make_abstract_model(module, module.Config.from_hf(hf_config), context)
    shapes = expected_shapes(model, module)
    model_type = hf_config["model_type"]
    values = ((name, tensor(name, shape, model_type)) for name, shape in shapes.items())
    load_weights(model, module, values)
    return model


def _unwritten(struct):
    """NaN where there is one."""
    nan = jnp.nan if jnp.issubdtype(struct.dtype, jnp.floating) else jnp.iinfo(struct.dtype).max
    return jnp.full(struct.shape, nan, struct.dtype)


class PagedModel:
    """A model, its cache, and sequences that own shuffled pages.

    Page 0 and every page nothing was written to hold NaN. Pages behind a group's window are taken
    out of its table, as the engine may.
    """

    def __init__(self, model, num_seqs, num_padding_rows=1, kv_dtype=np.float32):
        self.config = model.config
        self.kv_lens = [0] * num_seqs
        self.num_rows = num_seqs + num_padding_rows
        family = load_model_module(type(model).__module__.split(".")[-1])
        self.windows = [group.window for group in family.kv_groups(model.config)]
        self.num_groups = len(self.windows)
        num_pages = 1 + num_seqs * PAGES_PER_ROW
        rng = np.random.default_rng(0)
        tables = [1 + rng.permutation(num_pages - 1) for _ in range(self.num_groups)]
        self.tables = np.stack(tables).reshape(self.num_groups, num_seqs, PAGES_PER_ROW)
        structs = kv_structs(
            "cpu", kv_dtype, num_pages, PAGE_SIZE, model.num_cache_kv_heads, self.config.head_dim
        )
        empty = jax.tree.map(
            lambda struct, spec: jax.device_put(_unwritten(struct), model.context.sharding(*spec)),
            structs,
            kv_partition(structs, "tensor"),
        )
        self.kv = (empty,) * self.config.num_layers
        graphdef, state = nnx.split(model)
        self.leaves, treedef = jax.tree.flatten(state)

        @jax.jit
        def run(leaves, token_ids, positions, kv, metadata):
            merged = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            hidden, kv = merged(token_ids, positions, kv, metadata)
            return merged.logits(hidden), kv

        self.run = run

    def step(self, chunks, num_tokens=None):
        """Runs {sequence: token ids} in one step, padded to `num_tokens`; returns their logits."""
        order = sorted(chunks, key=lambda seq: (len(chunks[seq]) > 1, seq))
        lengths = [len(chunks[seq]) for seq in order]
        is_decode = max(lengths) == 1
        total = self.num_rows if is_decode else num_tokens or sum(lengths) + 3
        token_ids, positions = np.zeros((2, total), np.int32)
        slots = np.zeros((self.num_groups, total), np.int32)
        kv_lens = np.zeros(self.num_rows, np.int32)
        page_table = np.zeros((self.num_groups, self.num_rows, PAGES_PER_ROW), np.int32)
        starts = np.full(self.num_rows + 1, sum(lengths), np.int32)
        starts[: len(order) + 1] = np.cumsum([0, *lengths])
        for row, seq in enumerate(order):
            span = slice(starts[row], starts[row + 1])
            new = self.kv_lens[seq] + np.arange(lengths[row])
            token_ids[span], positions[span] = chunks[seq], new
            pages = self.tables[:, seq]
            slots[:, span] = pages[:, new // PAGE_SIZE] * PAGE_SIZE + new % PAGE_SIZE
            page_table[:, row] = pages
            for group, window in enumerate(self.windows):
                dropped = max(0, new[0] - window + 1) // PAGE_SIZE if window else 0
                page_table[group, row, :dropped] = 0
            self.kv_lens[seq] += lengths[row]
            kv_lens[row] = self.kv_lens[seq]
        metadata = AttentionMetadata(
            num_decodes=jnp.int32(lengths.count(1)),
            num_seqs=jnp.int32(len(order)),
            kv_lens=jnp.asarray(kv_lens),
            cu_q_lens=jnp.asarray(starts),
            slot_mapping=jnp.asarray(slots),
            page_table=jnp.asarray(page_table),
            is_decode=is_decode,
        )
        logits, self.kv = self.run(
            self.leaves, jnp.asarray(token_ids), jnp.asarray(positions), self.kv, metadata
        )
        rows = np.asarray(logits)
        return {seq: rows[starts[row] : starts[row + 1]] for row, seq in enumerate(order)}
