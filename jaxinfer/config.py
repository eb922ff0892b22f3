"""What can be configured: two frozen dataclasses from which flags and TOML keys are both derived.

A leaf: imports nothing of ours and no jax. A value is checked once, here, and never changes later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

_DTYPES = {
    "auto": "auto",
    **dict.fromkeys(("float32", "fp32", "f32"), "float32"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float16", "fp16", "f16", "half"), "float16"),
}
_KV_DTYPES = {**_DTYPES, "int8": "int8"}
_GROUP_SIZES = (16, 32, 64, 128)
_LOG_LEVELS = ("debug", "info", "warning", "error")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it, its value, the rule and the way out."""


def parse_bytes(text: str | int) -> int:
    """Returns a number of bytes from 4096, '512MB' (powers of 1000) or '2GiB' (powers of 1024)."""
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write bytes, or a number with KB, MiB, GB ...")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))


def _flag(
    default: Any,
    about: str | None,
    *,
    aliases: tuple[str, ...] = (),
    parse: Callable[[str], Any] | None = None,
    secret: bool = False,
) -> Any:
    """Declares a setting: its default, what `--help` says, and how text becomes its value."""
    metadata = {"about": about, "aliases": aliases, "parse": parse}
    return field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True)
class EngineConfig:
    """Which model runs, and how. None means that the engine decides from model and hardware.

    Raises:
      ConfigError: a value is outside its range, or two values exclude each other.
    """

    model: str | None = _flag(
        None,
        "hub id, directory or .gguf file (default: SmolLM2-135M-Instruct)",
        aliases=("-m",),
    )
    revision: str | None = _flag(None, "branch, tag or commit of a hub model")
    model_type: str | None = _flag(None, "refuse a checkpoint of any other architecture")
    tokenizer_path: str | None = _flag(
        None, "directory with tokenizer.json, if not the model's own (default: the model)"
    )
    chat_template: str | None = _flag(
        None, "built-in name or file of a chat template (default: the model's own)"
    )
    dtype: str = _flag("auto", "activations: auto, float32, bfloat16 or float16")
    exact: bool = _flag(
        False, "float32 activations and KV cache, highest matmul precision: for comparisons"
    )
    quant: str | None = _flag(
        None,
        "quantize weights at load: int8, int4, nf4, fp8, w8a8, Q8_0, Q4_0, HQQ8, HQQ4 or auto",
        aliases=("--isq",),
    )
    quant_group_size: int | None = _flag(
        None, "weights per scale with --quant: 16, 32, 64 or 128 (default: the format's own)"
    )
    kv_cache_dtype: str = _flag(
        "auto",
        "KV cache: auto, float32, bfloat16, float16, or int8 (with a scale per token and head)",
    )
    max_model_len: int | None = _flag(
        None,
        "context limit in tokens, prompt included (default: the model's)",
        aliases=("--max-total-tokens",),
    )
    max_num_seqs: int = _flag(32, "sequences that run at once", aliases=("--max-batch-size",))
    max_num_batched_tokens: int | None = _flag(
        None, "token budget of one step (default: 4096, on CPU 256)"
    )
    max_prefill_chunk_tokens: int | None = _flag(
        None,
        "prompt tokens in a step that also decodes (default: 512, within the budget; on CPU as "
        "many as take up to twice as long as its decodes)",
    )
    max_decode_steps_before_prefill: int = _flag(
        8, "decode-only steps allowed while a request that fits is waiting"
    )
    decode_steps: int | None = _flag(
        None,
        "decode steps fused into one program (default: 1; on CPU up to 4 for one or two sequences "
        "of a small model)",
    )
    max_queued_requests: int = _flag(512, "waiting requests beyond which new ones get a 429")
    page_size: int | None = _flag(None, "tokens in a KV page (default: 16, on TPU 128)")
    num_pages: int | None = _flag(None, "KV pages in the pool (default: from free memory)")
    kv_cache_memory: int | None = _flag(
        None,
        "size of the KV pool, for example 2GiB; excludes --num-pages",
        aliases=("--max-cache-size",),
        parse=parse_bytes,
    )
    prefix_cache: bool = _flag(
        True, "reuse the KV pages of earlier prompts that start with the same tokens"
    )
    speculation: str = _flag(
        "off",
        "ngram: guess tokens from what followed the same ones before, and verify several at once; "
        "the text is the same. Pays where outputs repeat the prompt",
    )
    deterministic: bool = _flag(
        False,
        "a request's text and log-probabilities depend on nothing but itself, to the last bit: not "
        "on what else runs, what is cached or what came before; slower",
    )
    num_draft_tokens: int = _flag(15, "tokens guessed at once for a sequence, with --speculation")
    tensor_parallel: int = _flag(1, "devices that share each layer")
    allow_fewer_devices: bool = _flag(
        False, "lower --tensor-parallel, with a warning, when fewer devices exist"
    )
    gpu_memory_utilization: float = _flag(0.9, "share of device memory to use, 0 to 1")
    num_threads: int | None = _flag(None, "CPU threads of XLA (default: one per core)")
    attention: str | None = _flag(None, "force one attention implementation, for example reference")
    matmul: str | None = _flag(None, "force one implementation of the matmul of quantized weights")
    pipeline_depth: int | None = _flag(None, "steps dispatched ahead of the host: 0 or 1")
    step_timeout: float = _flag(
        600.0, "seconds after which a step is taken to hang and the engine for dead; 0 never"
    )
    compilation_cache_dir: str | None = _flag(
        None, "where compiled programs are kept (default: the user's cache directory)"
    )

    def __post_init__(self) -> None:
        for name, dtypes in (("dtype", _DTYPES), ("kv_cache_dtype", _KV_DTYPES)):
            value, choices = getattr(self, name), list(dict.fromkeys(dtypes.values()))
            rule = f"must be {', '.join(choices[:-1])} or {choices[-1]}"
            _require(value in dtypes, name, value, rule)
            object.__setattr__(self, name, dtypes[value])
        for name in _POSITIVE_ENGINE_FIELDS:
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "must be at least 1")
        _require(
            self.max_decode_steps_before_prefill >= 0,
            "max_decode_steps_before_prefill",
            self.max_decode_steps_before_prefill,
            "must be at least 0",
        )
        _require(self.step_timeout >= 0, "step_timeout", self.step_timeout, "must be at least 0")
        _require(
            0 < self.gpu_memory_utilization <= 1,
            "gpu_memory_utilization",
            self.gpu_memory_utilization,
            "must be above 0 and at most 1",
        )
        _require(
            self.speculation in ("off", "ngram"),
            "speculation",
            self.speculation,
            "must be off or ngram",
        )
        _require(
            self.pipeline_depth in (None, 0, 1),
            "pipeline_depth",
            self.pipeline_depth,
            "must be 0 or 1",
        )
        self._check_pairs()

    def _check_pairs(self) -> None:
        size = self.quant_group_size
        _require(
            size is None or (size in _GROUP_SIZES and self.quant is not None),
            "quant_group_size",
            size,
            "must be 16, 32, 64 or 128, and goes with quant",
        )
        _require(
            self.num_pages is None or self.kv_cache_memory is None,
            "kv_cache_memory",
            self.kv_cache_memory,
            f"excludes num_pages ({self.num_pages}): both size the KV pool; give one of them",
        )
        for name in ("dtype", "kv_cache_dtype"):
            value = getattr(self, name)
            _require(
                not self.exact or value in ("auto", "float32"),
                name,
                value,
                "contradicts exact, which means float32; leave one of them out",
            )
        _require(
            not self.deterministic or self.speculation == "off",
            "speculation",
            self.speculation,
            "excludes deterministic: verified drafts round otherwise than single tokens; leave one "
            "of them out",
        )
        _require(
            not self.deterministic or self.decode_steps in (None, 1),
            "decode_steps",
            self.decode_steps,
            "must be 1 with deterministic: all decodes run in one program; leave one of them out",
        )
        budget = self.max_num_batched_tokens
        if budget is None:
            return
        _require(
            budget >= self.max_num_seqs,
            "max_num_batched_tokens",
            budget,
            f"must be at least max_num_seqs ({self.max_num_seqs}): each running sequence takes one",
        )
        chunk = self.max_prefill_chunk_tokens
        _require(
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

    host: str = _flag("127.0.0.1", "address to listen on; 0.0.0.0 for all of IPv4")
    port: int = _flag(8080, "port to listen on; 0 picks a free one", aliases=("-p",))
    served_model_name: tuple[str, ...] = _flag(
        (), "name clients use (repeatable; default: the model's own)"
    )
    api_key: tuple[str, ...] = _flag(
        (), "key clients must send (repeatable; also JAXINFER_API_KEY)", secret=True
    )
    protect_metrics: bool = _flag(False, "ask for the key on /metrics too")
    request_timeout: float | None = _flag(None, "seconds after which a request ends with a 504")
    shutdown_timeout: float = _flag(30.0, "seconds running requests get to finish on SIGTERM")
    default_max_tokens: int | None = _flag(
        None, "max_tokens of requests without one (default: 16 for completions, else the context)"
    )
    max_body_bytes: int = _flag(16 * 2**20, "largest request body, e.g. 16MiB", parse=parse_bytes)
    max_n: int = _flag(128, "largest n of a request")
    max_prompts: int = _flag(1024, "largest number of prompts in one completions request")
    generation_config: str = _flag(
        "auto", "auto: take default sampling from the checkpoint; none: OpenAI's defaults"
    )
    strict_params: bool = _flag(False, "answer 400 to unknown parameters instead of a log line")
    log_level: str = _flag("info", "debug, info, warning or error")
    log_requests: bool = _flag(False, "log prompts, cut to 200 characters")

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, "port", self.port, "must be 0 to 65535")
        for name in ("default_max_tokens", "max_body_bytes", "max_prompts"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "must be at least 1")
        _require(1 <= self.max_n <= 128, "max_n", self.max_n, "must be 1 to 128")
        timeout = self.request_timeout
        _require(timeout is None or timeout > 0, "request_timeout", timeout, "must be above 0")
        _require(
            self.shutdown_timeout >= 0,
            "shutdown_timeout",
            self.shutdown_timeout,
            "must be at least 0",
        )
        _require(
            self.generation_config in ("auto", "none"),
            "generation_config",
            self.generation_config,
            "must be auto or none",
        )
        _require(
            self.log_level in _LOG_LEVELS,
            "log_level",
            self.log_level,
            f"must be one of {', '.join(_LOG_LEVELS)}",
        )
        for name in ("api_key", "served_model_name"):
            if any(not value.strip() for value in getattr(self, name)):
                raise ConfigError(f"{name} must not be empty; leave it out instead")


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ConfigError(f"{name} {rule} (got {value!r})")


ConfigT = TypeVar("ConfigT", EngineConfig, ServerConfig)


@dataclass(frozen=True)
class Setting:
    """One field of a configuration, as a flag and as a TOML key.

    Attributes:
      name: the field.
      kind: str, int, float or bool, or the element type when `is_list`.
      is_list: whether the flag may be repeated.
      about: what `--help` says; None keeps it out of the list.
      aliases: other flags for it.
      parse: makes a value of text that is not simply of that kind.
    """

    name: str
    kind: type
    is_list: bool
    about: str | None
    aliases: tuple[str, ...]
    parse: Callable[[str], Any] | None

    def check(self, value: object) -> Any:
        """Returns a value from TOML as the field's type.

        Raises:
          ConfigError: it has another type.
        """
        if self.is_list:
            items = value if isinstance(value, list) else [value]
            return tuple(self._check_one(item) for item in items)
        return self._check_one(value)

    def _check_one(self, value: object) -> Any:
        if self.parse is not None and isinstance(value, str | int) and value is not True:
            return self.parse(str(value))
        if self.kind is float and type(value) is int:
            return float(value)
        if type(value) is not self.kind:
            raise ConfigError(f"{self.name} must be {self.kind.__name__}, got {value!r}")
        return value


def settings_of(config: type[EngineConfig] | type[ServerConfig]) -> tuple[Setting, ...]:
    """Returns the settings of a configuration class in the order of its fields."""
    kinds: Mapping[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
    found = []
    for item in fields(config):
        annotation = str(item.type)
        is_list = annotation.startswith("tuple[")
        kind = kinds[annotation.removeprefix("tuple[").split(",")[0].split(" ")[0]]
        found.append(Setting(item.name, kind, is_list, **item.metadata))
    return tuple(found)


def all_settings() -> dict[str, Setting]:
    """Returns the settings of both configurations by name."""
    both = (*settings_of(EngineConfig), *settings_of(ServerConfig))
    return {setting.name: setting for setting in both}


def override(config: ConfigT, values: Mapping[str, Any]) -> ConfigT:
    """Returns the configuration with those `values` that are fields of it."""
    own = {item.name for item in fields(config)}
    return replace(config, **{name: value for name, value in values.items() if name in own})
