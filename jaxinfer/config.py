"""What can be configured: two frozen dataclasses. A value is checked once, here, and never changes.

A leaf: imports no jax.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxinfer.settings import (
    ConfigError,
    Setting,
    flag,
    override,
    parse_bytes,
    require,
    require_choice,
    require_share,
    settings_of,
)

__all__ = [
    "ConfigError",
    "EngineConfig",
    "ServerConfig",
    "Setting",
    "all_settings",
    "override",
    "parse_bytes",
    "settings_of",
]

XLA_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Environment variable: the part of a GPU's memory that XLA takes when jax is imported."""

_DTYPES = {
    "auto": "auto",
    **dict.fromkeys(("float32", "fp32", "f32"), "float32"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float16", "fp16", "f16", "half"), "float16"),
}
_KV_DTYPES = {**_DTYPES, "int8": "int8"}
_GROUP_SIZES = (16, 32, 64, 128)
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s*]+")
_LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class EngineConfig:
    """Which model runs, and how. None means that the engine decides from model and hardware.

    Raises:
      ConfigError: a value is outside its range, or two values exclude each other.
    """

    model: str | None = flag(
        None,
        "hub id, directory or .gguf file (default: SmolLM2-135M-Instruct)",
        aliases=("-m",),
    )
    revision: str | None = flag(None, "branch, tag or commit of a hub model")
    model_type: str | None = flag(None, "refuse a checkpoint of any other architecture")
    tokenizer_path: str | None = flag(
        None, "directory with tokenizer.json, if not the model's own (default: the model)"
    )
    chat_template: str | None = flag(
        None, "built-in name or file of a chat template (default: the model's own)"
    )
    dtype: str = flag("auto", "activations: auto, float32, bfloat16 or float16")
    exact: bool = flag(
        False, "float32 activations and KV cache, highest matmul precision: for comparisons"
    )
    quant: str | None = flag(
        None,
        "quantize weights at load: int8, int4, nf4, fp8, w8a8, Q8_0, Q4_0, HQQ8, HQQ4 or auto",
        aliases=("--isq",),
    )
    quant_group_size: int | None = flag(
        None, "weights per scale with --quant: 16, 32, 64 or 128 (default: the format's own)"
    )
    kv_cache_dtype: str = flag(
        "auto",
        "KV cache: auto, float32, bfloat16, float16, or int8 (with a scale per token and head)",
    )
    max_model_len: int | None = flag(
        None,
        "context limit in tokens, prompt included (default: the model's)",
        aliases=("--max-total-tokens",),
    )
    max_num_seqs: int = flag(32, "sequences that run at once", aliases=("--max-batch-size",))
    max_num_batched_tokens: int | None = flag(
        None, "token budget of one step (default: 4096, on CPU 256)"
    )
    max_prefill_chunk_tokens: int | None = flag(
        None,
        "prompt tokens in a step that also decodes (default: 512, within the budget; on CPU as "
        "many as take up to twice as long as its decodes)",
    )
    max_decode_steps_before_prefill: int = flag(
        8, "decode-only steps allowed while a request that fits is waiting"
    )
    decode_steps: int | None = flag(
        None,
        "decode steps fused into one program (default: 1; on CPU up to 4 for one or two sequences "
        "of a small model)",
    )
    max_queued_requests: int = flag(512, "waiting requests beyond which new ones get a 429")
    max_queued_tokens: int | None = flag(
        None,
        "prompt tokens of waiting requests beyond which new ones get a 429 (default: no limit)",
    )
    prepare_grammars: bool = flag(
        False,
        "make the vocabulary ready for grammars at start, for 22 to 120 MB; otherwise the first "
        "grammar does, at which all streams pause for 0.1 to 1.2 s",
    )
    page_size: int | None = flag(None, "tokens in a KV page (default: 16, on TPU 128)")
    num_pages: int | None = flag(None, "KV pages in the pool (default: from free memory)")
    kv_cache_memory: int | None = flag(
        None,
        "size of the KV pool, for example 2GiB; excludes --num-pages",
        aliases=("--max-cache-size",),
        parse=parse_bytes,
    )
    prefix_cache: bool = flag(
        True, "reuse the KV pages of earlier prompts that start with the same tokens"
    )
    speculation: str = flag(
        "off",
        "ngram: guess tokens from what followed the same ones before, and verify several at once; "
        "the text is the same. Pays where outputs repeat the prompt",
    )
    deterministic: bool = flag(
        False,
        "a request's text and log-probabilities depend on nothing but itself, to the last bit: not "
        "on what else runs, what is cached or what came before; slower",
    )
    num_draft_tokens: int = flag(15, "tokens guessed at once for a sequence, with --speculation")
    tensor_parallel: int = flag(1, "devices that share each layer")
    allow_fewer_devices: bool = flag(
        False, "lower --tensor-parallel, with a warning, when fewer devices exist"
    )
    gpu_memory_utilization: float = flag(
        0.9,
        "share of a device's memory to use, 0 to 1: what XLA takes of a GPU at start (unless "
        f"{XLA_FRACTION} is set), and what the KV pool is sized by",
        aliases=("--memory-fraction",),
    )
    reserve_memory: int = flag(
        0,
        "memory a pool sized from what is free leaves free, for example for models loaded later",
        parse=parse_bytes,
    )
    kv_cache_share: float = flag(
        1.0, "part of what is left that a pool sized from free memory takes, above 0 to 1"
    )
    gpu_layers: int | None = flag(
        None,
        "accepted, with a warning, for llama.cpp's command lines: all layers run on one platform",
        aliases=("--n-gpu-layers",),
    )
    num_threads: int | None = flag(None, "CPU threads of XLA (default: one per core)")
    attention: str | None = flag(None, "force one attention implementation, for example reference")
    matmul: str | None = flag(None, "force one implementation of the matmul of quantized weights")
    pipeline_depth: int | None = flag(None, "steps dispatched ahead of the host: 0 or 1")
    step_timeout: float = flag(
        600.0, "seconds after which a step is taken to hang and the engine for dead; 0 never"
    )
    compilation_cache_dir: str | None = flag(
        None, "where compiled programs are kept (default: the user's cache directory)"
    )

    def __post_init__(self) -> None:
        for name, dtypes in (("dtype", _DTYPES), ("kv_cache_dtype", _KV_DTYPES)):
            value = dtypes.get(getattr(self, name), getattr(self, name))
            require_choice(name, value, *dict.fromkeys(dtypes.values()))
            object.__setattr__(self, name, value)
        for name in _POSITIVE_ENGINE_FIELDS:
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "must be at least 1")
        for name in ("max_decode_steps_before_prefill", "step_timeout", "reserve_memory"):
            value = getattr(self, name)
            require(value >= 0, name, value, "must be at least 0")
        for name in ("gpu_memory_utilization", "kv_cache_share"):
            require_share(name, getattr(self, name))
        require_choice("speculation", self.speculation, "off", "ngram")
        if self.pipeline_depth is not None:
            require_choice("pipeline_depth", self.pipeline_depth, 0, 1)
        self._check_pairs()

    def _check_pairs(self) -> None:
        size = self.quant_group_size
        require(
            size is None or (size in _GROUP_SIZES and self.quant is not None),
            "quant_group_size",
            size,
            "must be 16, 32, 64 or 128, and goes with quant",
        )
        require(
            self.num_pages is None or self.kv_cache_memory is None,
            "kv_cache_memory",
            self.kv_cache_memory,
            f"excludes num_pages ({self.num_pages}): both size the KV pool; give one of them",
        )
        for name in ("dtype", "kv_cache_dtype"):
            value = getattr(self, name)
            require(
                not self.exact or value in ("auto", "float32"),
                name,
                value,
                "contradicts exact, which means float32; leave one of them out",
            )
        require(
            not self.deterministic or self.speculation == "off",
            "speculation",
            self.speculation,
            "excludes deterministic: verified drafts round otherwise than single tokens; leave one "
            "of them out",
        )
        require(
            not self.deterministic or self.decode_steps in (None, 1),
            "decode_steps",
            self.decode_steps,
            "must be 1 with deterministic: all decodes run in one program; leave one of them out",
        )
        budget = self.max_num_batched_tokens
        if budget is None:
            return
        require(
            budget >= self.max_num_seqs,
            "max_num_batched_tokens",
            budget,
            f"must be at least max_num_seqs ({self.max_num_seqs}): each running sequence takes one",
        )
        chunk = self.max_prefill_chunk_tokens
        require(
            chunk is None or chunk <= budget,
            "max_prefill_chunk_tokens",
            chunk,
            f"must be at most max_num_batched_tokens ({budget})",
        )


_POSITIVE_ENGINE_FIELDS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_prefill_chunk_tokens",
    "decode_steps",
    "max_queued_requests",
    "max_queued_tokens",
    "page_size",
    "num_pages",
    "num_draft_tokens",
    "kv_cache_memory",
    "tensor_parallel",
    "num_threads",
)


@dataclass(frozen=True)
class ServerConfig:
    """How the model is offered over HTTP.

    Raises:
      ConfigError: a value is outside its range.
    """

    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0 for all of IPv4")
    port: int = flag(8080, "port to listen on; 0 picks a free one", aliases=("-p",))
    uds: str | None = flag(None, "listen on this Unix socket instead of host and port")
    metrics_port: int | None = flag(
        None, "serve /metrics on this port as well; without a number 8081", bare=8081
    )
    ssl_certfile: str | None = flag(None, "certificate chain (PEM): serve HTTPS")
    ssl_keyfile: str | None = flag(None, "its private key, where --ssl-certfile does not hold it")
    served_model_name: tuple[str, ...] = flag(
        (), "name clients use (repeatable; default: the model's own)"
    )
    api_key: tuple[str, ...] = flag(
        (), "key clients must send (repeatable; also JAXINFER_API_KEY)", secret=True
    )
    allowed_origins: tuple[str, ...] = flag(
        (), "origin whose web pages may ask, e.g. https://example.org; * for any (repeatable)"
    )
    protect_metrics: bool = flag(False, "ask for the key on /metrics too")
    request_timeout: float | None = flag(None, "seconds after which a request ends with a 504")
    shutdown_timeout: float = flag(30.0, "seconds running requests get to finish on SIGTERM")
    default_max_tokens: int | None = flag(
        None, "max_tokens of requests without one (default: 16 for completions, else the context)"
    )
    seed: int | None = flag(None, "seed of requests without one (default: another for each)")
    max_body_bytes: int = flag(16 * 2**20, "largest request body, e.g. 16MiB", parse=parse_bytes)
    max_n: int = flag(128, "largest n of a request")
    max_prompts: int = flag(1024, "largest number of prompts in one completions request")
    generation_config: str = flag(
        "auto", "auto: take default sampling from the checkpoint; none: OpenAI's defaults"
    )
    strict_params: bool = flag(False, "answer 400 to unknown parameters instead of a log line")
    log_level: str = flag("info", "debug, info, warning or error")
    log_format: str = flag("text", "text, or json: every line of the log is an object")
    log_requests: bool = flag(False, "log prompts, cut to 200 characters")

    def __post_init__(self) -> None:
        for name in ("port", "metrics_port"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= 65535, name, value, "must be 0 to 65535")
        require(
            self.metrics_port in (None, 0) or self.metrics_port != self.port,
            "metrics_port",
            self.metrics_port,
            "must be another than port, which serves /metrics anyway",
        )
        require(
            self.ssl_keyfile is None or self.ssl_certfile is not None,
            "ssl_keyfile",
            self.ssl_keyfile,
            "goes with ssl_certfile",
        )
        for name in ("default_max_tokens", "max_body_bytes", "max_prompts"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "must be at least 1")
        seed = self.seed
        require(seed is None or 0 <= seed < 2**63, "seed", seed, "must be 0 to 2^63 - 1")
        require(1 <= self.max_n <= 128, "max_n", self.max_n, "must be 1 to 128")
        timeout = self.request_timeout
        require(timeout is None or timeout > 0, "request_timeout", timeout, "must be above 0")
        require(
            self.shutdown_timeout >= 0,
            "shutdown_timeout",
            self.shutdown_timeout,
            "must be at least 0",
        )
        require_choice("generation_config", self.generation_config, "auto", "none")
        require_choice("log_level", self.log_level, *_LOG_LEVELS)
        require_choice("log_format", self.log_format, "text", "json")
        for origin in self.allowed_origins:
            require(
                _ORIGIN.fullmatch(origin) is not None,
                "allowed_origins",
                origin,
                "must be scheme://host[:port], null or *",
            )
        for name in ("api_key", "served_model_name"):
            if any(not value.strip() for value in getattr(self, name)):
                raise ConfigError(f"{name} must not be empty; leave it out instead")


def all_settings() -> dict[str, Setting]:
    """Returns the settings of both configurations by name."""
    both = (*settings_of(EngineConfig), *settings_of(ServerConfig))
    return {setting.name: setting for setting in both}
