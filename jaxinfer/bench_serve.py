"""`jaxinfer bench serve`: load on a server over HTTP, and the latencies its clients see.

The last line is one JSON object. Imports no jax: the server has the machine to itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxinfer.config import ConfigError
from jaxinfer.flag_values import number, positive
from jaxinfer.load_test import plot
from jaxinfer.load_test.client import LoadClient, Target, first_model, make_session
from jaxinfer.load_test.metrics import Slo, Summary
from jaxinfer.load_test.record import RequestRecord
from jaxinfer.load_test.spawn import spawned_server
from jaxinfer.load_test.workload import LoadRequest, RandomLengths, Replay, arrival_times

DEFAULT_URL = "http://127.0.0.1:8080"
DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxinfer bench serve`."""
    server = parser.add_argument_group("server")
    where = server.add_mutually_exclusive_group()
    where.add_argument("--url", default=DEFAULT_URL, help=f"default: {DEFAULT_URL}")
    where.add_argument(
        "--spawn",
        action="store_true",
        help="run `jaxinfer serve` with the flags after --, and stop it afterwards",
    )
    server.add_argument("server_flags", nargs="*", metavar="-- FLAG", help="with --spawn")
    server.add_argument("--model", metavar="NAME", help="default: the first that it offers")
    server.add_argument("--api-key", metavar="KEY", help="default: JAXINFER_API_KEY")
    server.add_argument(
        "--timeout", type=_above_zero, default=600.0, metavar="S", help="of a request, in seconds"
    )
    load = parser.add_argument_group("load")
    how = load.add_mutually_exclusive_group()
    how.add_argument(
        "--rate",
        type=_rate,
        metavar="R",
        help="requests a second, whatever became of earlier ones; inf: all at once",
    )
    how.add_argument(
        "--concurrency",
        type=positive,
        metavar="N",
        help=f"requests in flight, each followed by the next (default: {DEFAULT_CONCURRENCY}, "
        "or as the replayed file says)",
    )
    load.add_argument(
        "--burstiness",
        type=_above_zero,
        metavar="K",
        help="shape of the gamma distribution of gaps with --rate (default: 1, a Poisson process)",
    )
    load.add_argument(
        "--num-requests",
        type=positive,
        metavar="N",
        help=f"default: {DEFAULT_REQUESTS}, or all that are replayed",
    )
    load.add_argument(
        "--warmup", type=_count, default=2, metavar="N", help="unmeasured requests before them (2)"
    )
    load.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of all that is random (0); a prefix cache knows the prompts of one used before",
    )
    _add_workload(parser.add_argument_group("requests"))
    results = parser.add_argument_group("results")
    results.add_argument(
        "--slo", type=_slo, metavar="ttft:MS,tpot:MS,e2e:MS", help="count what keeps these"
    )
    results.add_argument("--json", type=Path, metavar="FILE", help="write all, with every request")
    results.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw it; pip install 'jaxinfer[bench]'"
    )


def _add_workload(group: Any) -> None:
    for flag, kind, default, about in (
        ("--input-len", positive, 128, "tokens of a prompt, its shared prefix aside"),
        ("--output-len", positive, 64, "tokens generated for each"),
        ("--range-ratio", _share, 0.0, "how far both may be from that, as a share of it"),
        ("--shared-prefix-len", _count, 0, "tokens that prompts of a group begin with"),
        ("--num-prefixes", positive, 1, "groups of prompts that share a prefix"),
    ):
        group.add_argument(flag, type=kind, metavar="N", help=f"{about} (default: {default})")
    group.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="JSON lines with prompt_tokens (a length or ids), output_tokens, maybe arrival_s",
    )
    group.add_argument(
        "--vocab-size", type=positive, default=32000, metavar="N", help="random ids are below it"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the load, prints its numbers, and returns the exit code: 1 if nothing came through.

    Raises:
      ValueError: flags do not go together (ConfigError), or the server is not usable.
      OSError: the server cannot be reached, or a file not read or written.
    """
    if args.server_flags and not args.spawn:
        raise ConfigError(f"{args.server_flags} are flags of a server; they go with --spawn")
    workload = _workload(args)
    figure_class = plot.load_figure() if args.plot is not None else None
    requests = workload.requests(_num_requests(args, workload), args.vocab_size, args.seed)
    if args.rate is None and args.concurrency is None and requests[0].arrival_s is None:
        args.concurrency = DEFAULT_CONCURRENCY
    with contextlib.ExitStack() as stack:
        url = args.url
        if args.spawn:
            url = stack.enter_context(spawned_server(args.server_flags))
        api_key = args.api_key or os.environ.get("JAXINFER_API_KEY")
        model, records = asyncio.run(_measure(args, url.rstrip("/"), api_key, requests))
    summary = Summary.of(records, args.slo)
    result = {"model": model, "load": _described(args, len(requests)), **summary.as_json()}
    result["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    print(summary.table())
    if args.json is not None:
        everything = {**result, "requests": [record.as_json() for record in records]}
        args.json.write_text(json.dumps(everything) + "\n", encoding="utf-8")
    if figure_class is not None:
        title = f"{model}: {summary.num_completed} of {summary.num_requests} requests"
        plot.draw(figure_class, records, title, args.plot)
    print(json.dumps(result))
    return 0 if summary.num_completed else 1


def _workload(args: argparse.Namespace) -> RandomLengths | Replay:
    names = ("input_len", "output_len", "range_ratio", "shared_prefix_len", "num_prefixes")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.burstiness is not None and args.rate is None:
        raise ConfigError("--burstiness shapes random arrivals; give --rate, too")
    if args.replay is None:
        return RandomLengths(**{"input_len": 128, "output_len": 64, **given})
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(f"{flags}: --replay says how long requests are; leave one of them out")
    return Replay.read(args.replay)


def _num_requests(args: argparse.Namespace, workload: RandomLengths | Replay) -> int:
    if args.num_requests is not None:
        return int(args.num_requests)
    return len(workload.lines) if isinstance(workload, Replay) else DEFAULT_REQUESTS


async def _measure(
    args: argparse.Namespace, url: str, api_key: str | None, requests: Sequence[LoadRequest]
) -> tuple[str, list[RequestRecord]]:
    """Returns the model's name and what became of each request."""
    async with make_session(api_key) as session:
        model = args.model or await first_model(session, url)
        target = Target(url, model, args.timeout)
        # Other prompts than those measured: a prefix cache must not know these.
        lengths = RandomLengths(input_len=64, output_len=16)
        warmup = lengths.requests(args.warmup, args.vocab_size, args.seed - 1)
        await LoadClient(session, target, _nothing).closed_loop(warmup, 1)
        with tqdm(total=len(requests), unit="request", disable=None, leave=False) as bar:
            client = LoadClient(session, target, bar.update)
            if args.concurrency is not None:
                return model, await client.closed_loop(requests, args.concurrency)
            arrivals = arrival_times(requests, args.rate, args.burstiness or 1.0, args.seed)
            return model, await client.open_loop(requests, arrivals)


def _nothing() -> None:
    pass


def _described(args: argparse.Namespace, num_requests: int) -> dict[str, Any]:
    """What was asked for, as the JSON keeps it."""
    names = (
        *("rate", "burstiness", "concurrency", "seed", "input_len", "output_len", "range_ratio"),
        *("shared_prefix_len", "num_prefixes"),
    )
    found = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if found.get("rate") == math.inf:
        found["rate"] = "inf"  # JSON has no such number
    if args.replay is not None:
        found["replay"] = args.replay.name
    if args.spawn:
        found["server_flags"] = args.server_flags
    return {**found, "num_requests": num_requests}


def _slo(text: str) -> Slo:
    try:
        return Slo.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


_count = number(int, lambda value: value >= 0, "at least 0")
_rate = number(float, lambda value: value > 0, "above 0")
_above_zero = number(float, lambda value: 0 < value < math.inf, "above 0 and finite")
_share = number(float, lambda value: 0 <= value <= 1, "from 0 to 1")
