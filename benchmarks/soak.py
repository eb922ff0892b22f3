"""Twenty minutes of everything at once against `python serve.py`, and what must hold after it.

    python benchmarks/soak.py --model SmolLM2-135M-Instruct.Q4_1.gguf [--minutes 20] [-- FLAG ...]

Chats and completions, streamed or not, with priorities, stop strings, seeds, grammars, several
choices, log-probabilities and shared prefixes; clients that go away; requests that must be refused;
a pool and a queue that are too small. Answers that are determined are compared with those that the
same server gave before, one after the other. The last line is one JSON object; the exit code is 1
where a rule is broken. Flags after -- go to the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
from soak_answers import (
    Answer,
    Difference,
    QueueFull,
    Wrong,
    check_room,
    compare,
    draw_gap,
    drawn,
    gap_between,
    greedy_gap,
    ids_by_name,
)
from soak_metrics import (
    COMPILATIONS,
    FAILED_STEPS,
    MUST_HAPPEN,
    PAGES,
    RSS,
    RUNNING,
    WAITING,
    metrics,
)
from soak_rules import error_lines, rss_growth, violations
from soak_traffic import (
    COMPLETIONS,
    MAX_BODY_BYTES,
    MAX_MODEL_LEN,
    BadRequest,
    Case,
    bad_requests,
    cases,
    noise,
    solo,
    variant,
)

from jaxinfer.load_test.client import make_session
from jaxinfer.load_test.spawn import spawned_server

NUM_CLIENTS, NUM_CASES = 20, 64
WAVE_S, PROGRESS_S = 10.0, 20.0
ANSWER_S, DRAIN_S = 300.0, 60.0
SCRIPT = str(Path(__file__).resolve().parent.parent / "serve.py")
SERVER_FLAGS = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "8", "--num-pages", "48"),
    *("--max-num-batched-tokens", "128", "--max-queued-requests", "12", "--speculation", "ngram"),
    *("--max-body-bytes", str(MAX_BODY_BYTES), "--shutdown-timeout", "5"),
)


class Soak:
    """The traffic on one server, and what was found wrong with its answers.

    Attributes:
      counts: what happened, by name.
      wrong: the first messages of rules that answers broke.
      differences: tokens other than alone, still to be explained.
      rss: (seconds since the start, bytes).
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cases = cases(self.rng, NUM_CASES)
        self.solo: list[Answer] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.differences: list[tuple[Case, Difference]] = []
        self.largest_error = 0.0
        self.tolerance = 0.0
        self.rss: list[tuple[float, float]] = []
        self._url = url
        self._session = session
        self._num_active = NUM_CLIENTS
        self._ends = 0.0
        self.bad = bad_requests()

    async def metrics(self) -> dict[str, float]:
        """The server's metrics."""
        return await metrics(self._session, self._url)

    async def ask_alone(self) -> None:
        """Gets each case's answer while nothing else runs."""
        for case in self.cases:
            answer, _ = await self.ask(case.path, solo(case))
            self.solo.append(answer)

    async def run(self, seconds: float) -> None:
        """Sends traffic for some time, until the last answer is there."""
        began = time.monotonic()
        self._ends = began + seconds
        async with asyncio.TaskGroup() as group:
            for index in range(NUM_CLIENTS):
                group.create_task(self._client(index))
            group.create_task(self._waves())
            group.create_task(self._watch(began))

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._ends

    async def _waves(self) -> None:
        """Changes how many clients there are: none, a few, or more than the server takes."""
        while not self._is_over:
            self._num_active = self.rng.choice((0, 1, 4, 12, NUM_CLIENTS, NUM_CLIENTS))
            wave_s = WAVE_S if self._num_active else WAVE_S / 5
            await asyncio.sleep(min(wave_s, max(0.0, self._ends - time.monotonic())))
        self._num_active = 0

    async def _watch(self, began: float) -> None:
        shown = 0.0
        while not self._is_over:
            now = time.monotonic() - began
            found = await self.metrics()
            self.rss.append((now, found[RSS]))
            if now - shown >= PROGRESS_S:
                shown = now
                print(
                    f"{now:6.0f} s: {self.counts['answers']:,} answers, "
                    f"{self.counts['tokens']:,} tokens, {self.counts['cancelled']:,} cancelled, "
                    f"{self.counts['refused']:,} refused, {self.counts['queue_full']:,} × 429, "
                    f"{found[MUST_HAPPEN['preemptions']]:,.0f} preempted, running "
                    f"{found[RUNNING]:.0f}, waiting {found[WAITING]:.0f}, "
                    f"{found[RSS] / 1e6:.1f} MB, {len(self.differences)} differ, "
                    f"{self.counts['wrong']} wrong",
                    flush=True,
                )
            await asyncio.sleep(1)

    async def _client(self, index: int) -> None:
        kinds = (self._case, self._noise, self._refused, self._look)
        while not self._is_over:
            if index >= self._num_active:
                await asyncio.sleep(0.1)
                continue
            [kind] = self.rng.choices(kinds, (12, 4, 3, 1))
            try:
                async with asyncio.timeout(2 * ANSWER_S):
                    await kind()
            except QueueFull:
                self.counts["queue_full"] += 1
                await asyncio.sleep(self.rng.uniform(0.05, 0.5))
            except (Wrong, aiohttp.ClientError, OSError, ValueError) as error:
                self.note(f"{kind.__name__}: {type(error).__name__}: {error}")

    def note(self, message: str) -> None:
        """Keeps what is wrong."""
        self.counts["wrong"] += 1
        if len(self.wrong) < 20:
            self.wrong.append(message[:600])
            print(f"WRONG: {message[:600]}", flush=True)

    async def _case(self) -> None:
        number = self.rng.randrange(NUM_CASES)
        case, expected = self.cases[number], self.solo[number]
        body = variant(self.rng, case)
        quits = self.rng.random() < 0.2
        if quits and not body["stream"]:
            return await self._go_away(case.path, body)
        answer, is_complete = await self.ask(
            case.path, body, self.rng.randint(1, 30) if quits else None
        )
        self.counts["answers" if is_complete else "cancelled"] += 1
        num_tokens = sum(len(choice.ids) for choice in answer.choices.values())
        self.counts["tokens"] += num_tokens
        try:
            found, error = compare(answer, expected, self.tolerance, is_complete)
            if is_complete and (answer.usage or {}).get("completion_tokens") != num_tokens:
                raise Wrong(f"usage {answer.usage}, but {num_tokens} tokens came")
        except Wrong as wrong:
            raise Wrong(f"{wrong} (case {number}: {body})") from None
        self.differences += [(case, difference) for difference in found]
        self.largest_error = max(self.largest_error, error)
        return None

    async def _noise(self) -> None:
        case = noise(self.rng)
        if self.rng.random() < 0.2:
            return await self._go_away(case.path, case.body)
        answer, _ = await self.ask(case.path, case.body)
        self.counts["noise"] += 1
        reasons = [choice.finish_reason for choice in answer.choices.values()]
        if len(reasons) != case.body["n"] or not {"stop", "length"}.issuperset(reasons):
            raise Wrong(f"{case.body['n']} choices ended with {reasons}: {case.body}")
        return None

    async def _go_away(self, path: str, body: dict[str, Any]) -> None:
        """Closes the connection at some moment before or while the answer comes."""
        try:
            async with asyncio.timeout(self.rng.expovariate(2)):
                await self.ask(path, body)
        except TimeoutError:
            self.counts["cancelled"] += 1

    async def _refused(self) -> None:
        await self.check_refused(self.rng.choice(self.bad))

    async def check_refused(self, bad: BadRequest) -> None:
        """Sends a request that cannot be answered.

        Raises:
          QueueFull: the server did not look further.
          Wrong: it was, or refused otherwise.
        """
        headers = {"Content-Type": "application/json"}
        async with self._session.post(
            self._url + bad.path, data=bad.data, headers=headers
        ) as response:
            check_room(response)
            status, text = response.status, await response.text()
        error = json.loads(text).get("error", {})
        if (status, error.get("code")) != (bad.status, bad.code) or not error.get("message"):
            raise Wrong(f"{bad.name} got {status} {text[:200]}, not {bad.status} {bad.code}")
        self.counts["refused"] += 1

    async def _look(self) -> None:
        """What operators do beside: another endpoint, or an empty cache."""
        url, kind = self._url, self.rng.random()
        if kind < 0.1:
            request = self._session.post(f"{url}/reset_prefix_cache")
        elif kind < 0.5:
            request = self._session.post(f"{url}/tokenize", json={"prompt": "some text 日本"})
        else:
            request = self._session.get(f"{url}/v1/models")
        async with request as response:
            if response.status != 200:
                raise Wrong(f"{response.url} answered {response.status}")
            await response.read()

    async def ask(
        self, path: str, body: dict[str, Any], num_events: int | None = None
    ) -> tuple[Answer, bool]:
        """Returns the answer, and whether it is complete; else `num_events` of it.

        Raises:
          QueueFull: the server has no room for it.
          Wrong: it is no answer.
        """
        answer = Answer()
        try:
            async with asyncio.timeout(ANSWER_S):
                url = self._url + path
                return answer, await answer.fetch(self._session, url, body, num_events)
        except TimeoutError:
            raise Wrong(f"no complete answer after {ANSWER_S:.0f} s: {body}") from None

    async def explain(self, model: str | None) -> list[float]:
        """Returns how near each difference is to a tie: in log-probability, or in probability.

        Asks the idle server for what it knows of the place.
        """
        gaps, names = [], None
        for case, difference in self.differences:
            body = {
                "prompt": difference.before,
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": 20,
                "return_token_ids": True,
            }
            async with self._session.post(self._url + COMPLETIONS, json=body) as response:
                found = await response.json()
            [top] = found["choices"][0]["logprobs"]["top_logprobs"]
            if case.is_greedy and not case.has_grammar:
                gaps.append(greedy_gap(list(top.values())))
                continue
            names = names or ids_by_name(model)
            by_id = {names[name]: value for name, value in top.items()}
            if case.has_grammar:
                gaps.append(gap_between(by_id, difference))
                continue
            u = drawn(case.body["seed"] + difference.index, len(difference.before))
            gaps.append(draw_gap(by_id, case.body["temperature"], case.body["top_k"], u))
        return gaps


async def drained(soak: Soak) -> dict[str, float]:
    """The metrics when nothing is left to do, or when that took too long."""
    end = time.monotonic() + DRAIN_S
    while True:
        found = await soak.metrics()
        if found[RUNNING] == found[WAITING] == found[PAGES] == 0 or time.monotonic() > end:
            return found
        await asyncio.sleep(0.2)


async def soaked(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs it all, and returns what was found."""
    async with make_session(None) as session:
        soak = Soak(url, session, args.seed)
        soak.tolerance = args.tolerance
        before = await soak.metrics()
        for bad in soak.bad:
            await soak.check_refused(bad)
        await soak.ask_alone()
        print(f"{NUM_CASES} answers alone, {len(soak.bad)} kinds of refusals", flush=True)
        await soak.run(60 * args.minutes)
        after = await drained(soak)
        gaps = await soak.explain(args.model)
    await asyncio.sleep(1)  # until the server knows that our connections are closed
    async with make_session(None) as session:
        open_files = (await metrics(session, url))["process_open_fds"]
    first, last = rss_growth(soak.rss, 60 * args.minutes)
    return {
        "minutes": args.minutes,
        "counts": dict(sorted(soak.counts.items())),
        "wrong": soak.wrong,
        "rss_mb": [round(first / 1e6, 2), round(last / 1e6, 2)],
        "rss_growth": round(last / first - 1, 5),
        "differences": len(gaps),
        "largest_gap": max(gaps, default=0.0),
        "largest_logprob_error": soak.largest_error,
        "happened": {name: after[key] - before[key] for name, key in MUST_HAPPEN.items()},
        "left": {name: after[name] for name in (RUNNING, WAITING, PAGES)},
        "baseline_pages": before[PAGES],
        "compilations": after[COMPILATIONS],
        "failed_steps": after[FAILED_STEPS],
        "open_files": [before["process_open_fds"], open_files],
    }


def result(flags: list[str], args: argparse.Namespace, log: IO[bytes]) -> dict[str, Any]:
    """Starts a server, runs it all and stops it; returns what was found, its log's faults too."""
    found: dict[str, Any] = {}
    command, env = (sys.executable, SCRIPT), {"XLA_FLAGS": ""}
    try:
        with spawned_server(flags, command, env, log, ends_well=True) as url:
            found = asyncio.run(soaked(url, args))
    except Exception as error:  # a server that died, or did not exit with 0
        traceback.print_exc()
        found["violations"] = [f"it ended early: {error!r}"]
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    if "violations" in found:
        return {**found, "log": lines[-20:]}
    found["log_errors"] = error_lines(lines)
    warnings = Counter(line.split(" WARNING ")[1] for line in lines if " WARNING " in line)
    found["log_warnings"] = dict(warnings.most_common(5))
    return {**found, "violations": violations(found, args.tolerance)}


def main() -> int:
    """Prints progress, what was found, and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of log-probabilities, ties")
    parser.add_argument(
        "--no-exact", action="store_true", help="serve without --exact; needs more --tolerance"
    )
    parser.add_argument("--log", type=Path, help="write the server's log there")
    parser.add_argument("server_flags", nargs="*", metavar="-- FLAG")
    args = parser.parse_args()
    flags = [*SERVER_FLAGS, *([] if args.no_exact else ["--exact"]), *args.server_flags]
    if args.model is not None:
        flags += ["--model", args.model]
    with args.log.open("w+b") if args.log else tempfile.TemporaryFile() as log:
        found = result(flags, args, log)
    for broken in found["violations"]:
        print(f"BROKEN: {broken}")
    print(json.dumps(found))
    return 1 if found["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
