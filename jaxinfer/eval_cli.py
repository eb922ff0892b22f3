"""`jaxinfer eval`: perplexity of a model, and its divergence from its own `--exact` run.

Of two models one is in memory at a time, beside the other's embedding and head: the peak is that of
the exact one, whose weights are float32 where they are not kept quantized.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoint import Checkpoint
from jaxinfer.compilation_cache import set_compilation_cache
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.evaluation import (
    Divergence,
    Reader,
    Window,
    divergence,
    likelihood,
    make_windows,
    targets_of,
)
from jaxinfer.machine import peak_rss_bytes, versions
from jaxinfer.model_loading import context_length, load_model
from jaxinfer.models import load_model_module
from jaxinfer.startup import cache_spec, open_model
from jaxinfer.text.tokenizer import Tokenizer

WINDOW = 1024
CHUNK = 256
"""Tokens in a step where `--max-num-batched-tokens` does not say: the engine's default on CPU."""

_MEASURES = {
    "perplexity": "measure how well the model predicts a text",
    "kl": "measure how far the model is from its own --exact run, over the whole vocabulary",
}
_SHARED_WITH_EXACT = (
    *("model", "revision", "model_type", "tokenizer_path", "max_model_len", "page_size"),
    *("max_num_seqs", "max_num_batched_tokens", "tensor_parallel", "allow_fewer_devices"),
)
_BUILT_IN = "evaluation.txt"


def add_measures(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Declares the measures and their own flags; returns their parsers, for the engine's flags."""
    measures = parser.add_subparsers(dest="measure", required=True, metavar="MEASURE")
    added = []
    for name, summary in _MEASURES.items():
        measure = measures.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        measure.add_argument(
            "--text",
            type=Path,
            metavar="FILE",
            help="UTF-8 text to predict (default: a built-in one of 14 kB)",
        )
        for flag, about in (
            ("--window", f"tokens read at once (default: {WINDOW}, within the model's context)"),
            ("--stride", "tokens by which windows move on (default: half a window)"),
        ):
            measure.add_argument(flag, type=int, metavar="N", help=about)
        measure.add_argument("--json", action="store_true", help="print only the JSON line")
        added.append(measure)
    return added


def run(config: EngineConfig, args: argparse.Namespace) -> int:
    """Measures, and prints what was found, as one JSON object in the last line; returns 0.

    Raises:
      ConfigError: a flag's value cannot be used.
      ValueError: the checkpoint cannot be used, or gives logits that are not finite.
      OSError: the text cannot be read.
    """
    began = time.perf_counter()
    subject = _open(config, args)
    found = _perplexity(subject) if args.measure == "perplexity" else _kl(subject)
    device = jax.devices()[0]
    result = {
        "measure": args.measure,
        "model": subject.name,
        "settings": _settings(config),
        "text": {"name": (args.text or Path(_BUILT_IN)).name, "tokens": subject.num_tokens},
        "predicted": sum(window.num_scored for window in subject.windows),
        "window": subject.window,
        "stride": subject.stride,
        "bos": subject.bos,
        **found,
        "peak_rss_mb": round(peak_rss_bytes() / 1e6),
        "peak_device_mb": _peak_device_mb(device),
        "seconds": round(time.perf_counter() - began, 1),
        "device": device.device_kind,
        "versions": versions(),
    }
    if not args.json:
        print("\n".join(_report(result)))
    print(json.dumps(result))
    return 0


@dataclass(frozen=True)
class _Subject:
    """A checkpoint, and the windows of a text in its tokens."""

    config: EngineConfig
    checkpoint: Checkpoint
    name: str
    num_tokens: int
    bos: int | None
    window: int
    stride: int
    windows: list[Window]
    progress: bool


def _open(config: EngineConfig, args: argparse.Namespace) -> _Subject:
    text = read_text(args.text)
    path, checkpoint, tokenizer = open_model(config)
    set_compilation_cache(config.compilation_cache_dir)
    model_config = load_model_module(checkpoint.model_type).Config.from_hf(checkpoint.hf_config)
    limit = context_length(config, model_config)
    window = min(WINDOW, limit) if args.window is None else args.window
    if window > limit:
        raise ConfigError(f"window is {window}, but the context is {limit} tokens; lower it")
    stride = max(1, window // 2) if args.stride is None else args.stride
    bos = _bos(tokenizer)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return _Subject(
        config=config,
        checkpoint=checkpoint,
        name=path.resolve().name.removesuffix(".gguf"),
        num_tokens=len(token_ids),
        bos=bos,
        window=window,
        stride=stride,
        windows=make_windows(token_ids, window, stride, bos),
        progress=not args.json,
    )


def read_text(path: Path | None) -> str:
    """Returns the text of a file, or the built-in one.

    Raises:
      ConfigError: the file is not UTF-8.
      OSError: it cannot be read.
    """
    if path is None:
        return files("jaxinfer").joinpath("data", _BUILT_IN).read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"text {str(path)!r} is not UTF-8: {error}") from error


def _bos(tokenizer: Tokenizer) -> int | None:
    """The beginning-of-sequence id, if the tokenizer puts one before a text."""
    added = tokenizer.encode("")
    return tokenizer.bos_token_id if tokenizer.bos_token_id in added[:1] else None


def _read(subject: _Subject, config: EngineConfig, title: str) -> tuple[Reader, np.ndarray]:
    """Returns the model, of which the head is left, and its hidden states over all windows."""
    model, groups = load_model(config, subject.checkpoint, subject.progress)
    reader = Reader(
        model,
        cache_spec(config, model),
        num_groups=len(groups),
        length=subject.window,
        chunk=config.max_num_batched_tokens or CHUNK,
    )
    hidden = reader.hidden(subject.windows, title, subject.progress)
    reader.keep_head()
    return reader, hidden


def _perplexity(subject: _Subject) -> dict[str, Any]:
    reader, hidden = _read(subject, subject.config, "Reading")
    targets = targets_of(subject.windows)
    return _summary(reader, likelihood(reader.model, hidden, targets, subject.progress))


def _kl(subject: _Subject) -> dict[str, Any]:
    shared = {name: getattr(subject.config, name) for name in _SHARED_WITH_EXACT}
    exact, exact_hidden = _read(subject, EngineConfig(exact=True, **shared), "Reading, exact")
    candidate, hidden = _read(subject, subject.config, "Reading")
    found = divergence(
        (exact.model, exact_hidden),
        (candidate.model, hidden),
        targets_of(subject.windows),
        subject.progress,
    )
    return {
        **_divergence_summary(found),
        "candidate": _summary(candidate, found.nll),
        "exact": _summary(exact, found.reference_nll),
    }


def _divergence_summary(found: Divergence) -> dict[str, Any]:
    kl = found.kl.astype(np.float64)
    return {
        "kl_mean": float(kl.mean()),
        "kl_p99": float(np.percentile(kl, 99)),
        "kl_max": float(kl.max()),
        "top1_agreement": float(found.is_same_top.mean()),
        "max_nll_difference": float(np.abs(found.nll - found.reference_nll).max()),
    }


def _summary(reader: Reader, nll: np.ndarray) -> dict[str, Any]:
    context = reader.model.context
    mean = float(nll.astype(np.float64).mean())
    return {
        "perplexity": float(np.exp(mean)),
        "nll": mean,
        "weight_mb": round(reader.weight_bytes / 1e6, 1),
        "kv_bytes_per_token": reader.kv_bytes_per_token,
        "activations": context.dtype.name,
        # On CPU bfloat16 is held as its bits.
        "kv_cache": np.dtype(reader.cache.dtype).name.replace("uint16", "bfloat16"),
    }


def _settings(config: EngineConfig) -> dict[str, Any]:
    """The settings that are not their defaults."""
    values = {item.name: (getattr(config, item.name), item.default) for item in fields(config)}
    del values["model"]
    return {name: value for name, (value, default) in values.items() if value != default}


def _peak_device_mb(device: jax.Device) -> int | None:
    """The most memory the first device has held; None where it does not tell, as on CPU."""
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return None if peak is None else round(peak / 1e6)


def _report(result: dict[str, Any]) -> list[str]:
    """Lines for people."""
    bos = "no BOS" if result["bos"] is None else f"BOS {result['bos']} before each"
    lines = [
        f"text         {result['text']['name']}: {result['text']['tokens']} tokens, "
        f"{result['predicted']} predicted",
        f"windows      of {result['window']} tokens, {result['stride']} apart, {bos}",
    ]
    if result["measure"] == "perplexity":
        return [*lines, *_model_lines(result)]
    lines += [
        f"KL           {result['kl_mean']:.6f} nats per token (99th percentile "
        f"{result['kl_p99']:.6f}, max {result['kl_max']:.6f})",
        f"same top-1   {100 * result['top1_agreement']:.2f} %",
        f"NLL          differs by up to {result['max_nll_difference']:.4f} nats",
    ]
    for name in ("exact", "candidate"):
        lines += ["", f"{name}:", *_model_lines(result[name])]
    return lines


def _model_lines(summary: dict[str, Any]) -> list[str]:
    return [
        f"perplexity   {summary['perplexity']:.4f} ({summary['nll']:.5f} nats per token)",
        f"weights      {summary['weight_mb']} MB",
        f"KV cache     {summary['kv_cache']}, {summary['kv_bytes_per_token']:.0f} bytes per token",
    ]
