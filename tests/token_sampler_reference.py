"""The sampler in numpy and float64, and what a row asks for as arrays."""

from __future__ import annotations

import numpy as np

from kernels.token_sampler import SamplerRows, TokenMasks

BANNED = np.finfo(np.float32).min


def uniform(seed: int, position: int) -> float:
    """The counter hash in Python's integers."""

    def mix(x):
        x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    seed %= 2**64
    bits = 0x9E3779B9
    for word in (seed & 0xFFFFFFFF, seed >> 32, int(position)):
        bits = (mix(bits ^ word) + 0x9E3779B9) % 2**32
    return (mix(bits) >> 8) / 2**24


def make_rows(settings, vocab_size, num_stops=4, num_biases=20) -> SamplerRows:
    """Rows that ask for `settings`, dicts of: temperature (1), top_k, top_p, min_p, repetition,
    presence, frequency, seed, min_length, stop_ids, bias (id to value), prompt and output (ids).
    """
    count = len(settings)
    stop_ids = np.full((count, num_stops), -1, np.int32)
    bias_ids = np.full((count, num_biases), vocab_size, np.int32)
    bias_values = np.zeros((count, num_biases), np.float32)
    counts = np.zeros((count, vocab_size), np.int16)
    reals, integers = [], []
    for row, asks in enumerate(settings):
        seed, bias = asks.get("seed", 0) % 2**64, asks.get("bias", {})
        reals.append(
            (
                *(asks.get("temperature", 1.0), asks.get("top_p", 1.0), asks.get("min_p", 0.0)),
                *(asks.get("repetition", 1.0), asks.get("presence", 0.0)),
                asks.get("frequency", 0.0),
            )
        )
        has_penalties = bool({"repetition", "presence", "frequency"} & asks.keys())
        integers.append(
            (
                *(asks.get("top_k", 0), seed & 0xFFFFFFFF, seed >> 32),
                *(asks.get("min_length", 0), bool(bias), has_penalties),
            )
        )
        stops = sorted(asks.get("stop_ids", ()))
        stop_ids[row, : len(stops)] = stops
        bias_ids[row, : len(bias)] = list(bias)
        bias_values[row, : len(bias)] = list(bias.values())
        counts[row, list(asks.get("prompt", ()))] |= 1
        np.add.at(counts[row], list(asks.get("output", ())), 2)
    return SamplerRows(
        np.array(reals, np.float32),
        np.array(integers, np.uint32).view(np.int32),
        stop_ids,
        bias_ids,
        bias_values,
        counts,
    )


def make_masks(allowed, rows, vocab_size) -> TokenMasks:
    """A mask for each set of ids, None allowing all; `rows` says whose each row of logits is."""
    bits = np.zeros((len(allowed), -(-vocab_size // 32) * 32), bool)
    for row, ids in enumerate(allowed):
        bits[row, range(vocab_size) if ids is None else list(ids)] = True
    words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    return TokenMasks(words, np.asarray(rows, np.int32), np.bool_(True))


def shaped(logits, asks, length, allowed=None) -> np.ndarray:
    x = logits.astype(np.float64)
    for token, bias in asks.get("bias", {}).items():
        x[token] += bias
    prompt, output = asks.get("prompt", ()), list(asks.get("output", ()))
    for token in {*prompt, *output}:
        penalty, times = asks.get("repetition", 1.0), output.count(token)
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
        x[token] -= times * asks.get("frequency", 0.0) + (times > 0) * asks.get("presence", 0.0)
    if length < asks.get("min_length", 0):
        x[[token for token in asks.get("stop_ids", ()) if token < len(x)]] = BANNED
    if allowed is not None:
        x[np.setdiff1d(np.arange(len(x)), sorted(allowed))] = BANNED
    return x


def kept(logits, asks) -> tuple[np.ndarray, float]:
    """Weights of float32 logits, zero for what filters leave out, and how far from another set.

    Ties at top-k are those of the scaled logits in float32, as every implementation has them.
    """
    temperature = np.float32(asks.get("temperature", 1.0))
    with np.errstate(over="ignore"):
        scaled = (logits - logits.max()) / temperature
    weights = np.exp(scaled.astype(np.float64))
    descending = np.sort(scaled)[::-1]
    is_kept, margin = np.ones(len(logits), bool), 1.0
    if 0 < asks.get("top_k", 0) <= len(logits):
        is_kept &= scaled >= descending[asks["top_k"] - 1]
    if asks.get("top_p", 1.0) < 1:
        weights = np.where(is_kept, weights, 0.0)
        # Ties stay and go together: what counts is the mass behind each distinct value.
        cdf = np.cumsum(np.sort(weights)[::-1]) / weights.sum()
        last = min(np.searchsorted(cdf, asks["top_p"], side="left"), len(cdf) - 1)
        ends = np.append(descending[1:] != descending[:-1], True)
        margin = np.min(np.abs(cdf - asks["top_p"])[ends])
        is_kept &= scaled >= descending[last]
    if asks.get("min_p", 0.0) > 0:
        is_kept &= weights >= asks["min_p"]
        others = weights[scaled < 0]
        margin = min(margin, np.min(np.abs(others - asks["min_p"]), initial=1.0))
    return np.where(is_kept, weights, 0.0), margin


def tokens(logits, asks, lengths, allowed=None) -> list[tuple[int, float]]:
    """At each length the token, and how far the row is from another one, of its total weight."""
    found, known = [], {}
    for length in lengths:
        is_short = length < asks.get("min_length", 0)
        if is_short not in known:
            x = shaped(logits, asks, length, allowed).astype(np.float32)
            known[is_short] = x, *(kept(x, asks) if asks.get("temperature", 1.0) else (None, 1.0))
        x, weights, margin = known[is_short]
        if weights is None:
            second = np.max(x[x < x.max()], initial=-np.inf)
            found.append((int(np.argmax(x)), x.max() - second))
            continue
        cdf = np.cumsum(weights)
        mass = uniform(asks.get("seed", 0), length) * cdf[-1]
        edge = np.min(np.abs(cdf - mass)[weights > 0]) / cdf[-1]
        found.append((int(np.searchsorted(cdf, mass, side="right")), min(margin, edge)))
    return found
