"""Generated schedules over real tiny models: whatever happens, each request answers as if alone.

All that may meet in an engine at once: prompts that share beginnings, next turns, siblings,
priorities, salts, seeds, penalties, biases, grammars, stop strings and ids, scores, drafts, several
decode steps in one, either pipeline depth, cancellations, and a pool that is too small.
"""

import dataclasses
import functools
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from engine.builders import (
    PAGE_SIZE,
    SPECULATION,
    Client,
    compiled_runner,
    deterministic_engine,
    fresh,
    new_engine,
    run_requests,
    tiny_model,
)
from engine.schedule_kinds import KINDS, LONGEST, choice_of, full_forward, params_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from scheduler.builders import Schedules

TOLERANCE = 1e-4
"""DESIGN §6: of log-probabilities; and a choice nearer than this to another may be the other."""
CROWDS = st.lists(
    st.tuples(
        st.integers(0, 8),  # of the prompt
        st.sampled_from(list(KINDS)),
        st.integers(0, 1),  # priority
        st.sampled_from([None, None, "a", "b", "c", "d"]),  # salt
        st.sampled_from([None, False]),  # speculation
    ),
    min_size=1,
    max_size=4,
)
# With 14 tokens to come many fill their last page.
A, B = np.random.default_rng(0).integers(0, 256, (2, 110)).tolist()
SHORT = (A[:1], A[:10], A[:16], A[:18], A[:26], A[:17] + B[:5], A[:8] + B[:14], B[:22], 3 * B[:8])
LONG = (A[:1], A[:36], A[:64], A[:70], A[:70] + B[:30], A[:70] + B[:28], A[:36] + B[:40], 9 * B[:7])


def each_alone(make_engine, prompt, kind):
    """The outputs of a request's siblings, each as a request of its own in an engine of its own."""
    params = params_of(kind)
    singles = [params.for_choice(index, params.seed or 0) for index in range(params.n)]
    return [run_requests(make_engine(), [(prompt, single)])[0] for single in singles]


@functools.cache
def exact_alone(model_type, prompt, kind):
    """In a plain engine: no cache, no drafts, one step after the other."""
    runner, groups = compiled_runner(model_type), tiny_model(model_type)[1]
    return each_alone(lambda: new_engine(runner, groups), prompt, kind)


@functools.cache
def deterministic_alone(name, prompt, kind):
    return each_alone(lambda: fresh(deterministic_engine(name), depth=0), prompt, kind)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "scored only"])
def test_alone_each_answers_what_its_logits_say(model_type, kind):
    near = total = 0
    for prompt in SHORT[2::2]:
        params = params_of(kind)
        for index, output in enumerate(exact_alone(model_type, tuple(prompt), kind)):
            single = params.for_choice(index, params.seed or 0)
            ids = output.outputs[0].token_ids
            logits = full_forward(model_type)(prompt + ids)[len(prompt) - 1 :]
            for count, token in enumerate(ids):
                chosen, margin = choice_of(logits[count], single, prompt, ids[:count])
                assert chosen == token or margin < TOLERANCE
                near += chosen != token
                total += 1
    assert near < 0.01 * total


# Schedules.


class Sent(NamedTuple):
    prompt: tuple[int, ...]
    kind: str
    priority: int
    salt: str | None


class RealEngine(Schedules):
    """Whatever happens to an engine around a compiled runner; `seen` counts what did.

    Subclasses have `prompts`, make the engine, tell what a request answers alone, and compare.
    """

    def begin(self, engine, crowd):
        self.device, self.scheduler = Client(engine), engine.scheduler
        self.num_programs = engine.runner.num_programs
        self.sent, self.sequences, self.seen = {}, [], Counter()
        self.send_all(crowd)

    @rule(crowd=CROWDS)
    def send_all(self, crowd):
        for index, *options in crowd:
            self.send(self.prompts[index % len(self.prompts)], *options)

    @rule()
    def idle(self):
        """Nothing happens until nearly all has ended."""
        for _ in range(40):
            self.device.step()

    @precondition(lambda self: getattr(self, "sequences", None))
    @rule(data=st.data(), count=st.integers(1, 3))
    def follow_up(self, data, count):
        """Next turns, also while the one before is not over."""
        names = st.lists(st.sampled_from(self.sequences), min_size=count, max_size=count)
        for name in data.draw(names):
            output, before = self.device.outputs[name], self.sent[name]
            kind = before.kind if "scored" not in before.kind else "greedy"
            prompt = [*before.prompt, *output.outputs[0].token_ids, 1]
            self.send(prompt, kind, 0, before.salt)

    def send(self, prompt, kind, priority, salt, speculation=None):
        params = dataclasses.replace(params_of(kind), speculation=speculation)
        num_tokens = len(prompt) + params.max_tokens
        if num_tokens <= self.longest and self.scheduler.fits(num_tokens):
            options = {"priority": priority, "cache_salt": salt}
            name = self.device.add(prompt, params, **options)
            self.sent[name] = Sent(tuple(prompt), kind, priority, salt)
            self.sequences.append(name)

    def end(self, sequence, reason):
        self.device.abort(sequence)

    def teardown(self):
        if not hasattr(self, "sent"):
            return
        client, engine = self.device, self.device.engine
        client.drain()
        stats = engine.stats()
        choices = [choice for output in client.outputs.values() for choice in output.outputs]
        assert stats.generation_tokens == sum(len(choice.token_ids) for choice in choices)
        assert stats.finished == Counter(choice.finish_reason for choice in choices)
        assert engine.runner.num_programs == self.num_programs
        engine.clear_prefix_cache()
        assert all(pool.num_idle == 0 for pool in self.scheduler.tables.pools)
        for name in self.sent:
            self.check(name)
        self.count(stats)
        assert self.seen["near ties"] <= 1 + 0.01 * stats.generation_tokens

    def check(self, name):
        output, prompt, kind = self.device.outputs[name], *self.sent[name][:2]
        alone = self.alone(prompt, kind)
        assert output.num_cached_tokens <= self.most_cached(name)
        whole = all(choice.finish_reason != "abort" for choice in output.outputs)
        if whole or output.prompt_logprobs is not None:
            self.compare_scores(output.prompt_logprobs, alone[0].prompt_logprobs)
        for index, (choice, expected) in enumerate(zip(output.outputs, alone, strict=True)):
            (expected,) = expected.outputs
            if self.num_same(prompt, kind, index, choice, expected) < len(choice.token_ids):
                continue  # another text from a near tie on
            if choice.finish_reason == "abort":
                assert expected.text.startswith(choice.text)
                continue
            expected = dataclasses.replace(expected, index=index, logprobs=choice.logprobs)
            assert choice == expected

    def most_cached(self, name):
        """Tokens of a prompt that another of the same salt may have computed before it began.

        One that waits for a page that another computes may be overtaken by those behind it.
        """
        mine = self.sent[name]
        if self.scheduler.cache is None or params_of(mine.kind).prompt_logprobs is not None:
            return 0
        ahead, behind, came_before = 0, 0, True
        for other, sent in self.sent.items():
            came_before &= other != name
            if sent.salt != mine.salt or other == name:
                continue
            for choice in self.device.outputs[other].outputs:
                pairs = zip(mine.prompt[:-1], (*sent.prompt, *choice.token_ids), strict=False)
                same = [one == its for one, its in pairs]
                shared = same.index(False) if False in same else len(same)
                if came_before or sent.priority < mine.priority:
                    ahead = max(ahead, shared)
                else:
                    behind = max(behind, shared)
        most = max(ahead, behind) if ahead >= PAGE_SIZE else ahead
        return most // PAGE_SIZE * PAGE_SIZE

    def count(self, stats):
        self.seen["together"] += stats.generation_tokens > stats.steps
        self.seen["aborts"] += stats.finished.get("abort", 0)
        self.seen["cached tokens"] += stats.prefix_cache_hits
        self.seen["preemptions"] += stats.num_preemptions
        self.seen["accepted drafts"] += stats.num_accepted_tokens
        self.seen["wrong drafts"] += stats.num_draft_tokens - stats.num_accepted_tokens


class Exact(RealEngine):
    """Class E1: a float32 model at the highest precision."""

    prompts, longest = SHORT, LONGEST

    @initialize(
        crowd=CROWDS,
        rows=st.sampled_from([4, 3, 2]),
        budget=st.integers(4, 32),
        chunk=st.integers(1, 32),
        num_pages=st.integers(16, 28),
        prefix_cache=st.sampled_from([True, False]),
        depth=st.integers(0, 1),
        decode_steps=st.sampled_from([1, 4]),
        speculation=st.sampled_from([SPECULATION, {}]),
    )
    def start(self, crowd, rows, budget, chunk, depth, speculation, **options):
        runner, groups = compiled_runner(self.model_type), tiny_model(self.model_type)[1]
        engine = new_engine(
            runner,
            groups,
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_prefill_chunk_tokens=min(chunk, budget),
            pipeline_depth=depth,
            **options,
            **speculation,
        )
        self.begin(engine, crowd)

    def alone(self, prompt, kind):
        return exact_alone(self.model_type, prompt, kind)

    def num_same(self, prompt, kind, index, choice, expected):
        """Tokens before the first that differs, which only a near tie excuses."""
        mine, theirs = choice.token_ids, expected.token_ids
        assert len(mine) <= len(theirs) or mine[: len(theirs)] != theirs
        pairs = zip(mine, theirs, strict=False)
        same = next((i for i, (one, other) in enumerate(pairs) if one != other), len(mine))
        if same < len(mine):
            params = params_of(kind)
            params = params.for_choice(index, params.seed or 0)
            logits = full_forward(self.model_type)((*prompt, *mine[:same]))[-1]
            margin = choice_of(logits, params, prompt, mine[:same])[1]
            assert margin < TOLERANCE, f"{kind}: token {same} is not what it is alone"
            self.seen["near ties"] += 1
        if expected.logprobs is not None:
            self.compare_scores((choice.logprobs or [])[:same], expected.logprobs[:same])
        return same

    def compare_scores(self, mine, theirs):
        assert (mine is None) == (theirs is None)
        for one, other in zip(mine or (), theirs or (), strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.token_id == other.token_id
                assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)


class Deterministic(RealEngine):
    """Class E0: in dtypes that round, bit for bit."""

    prompts, longest = LONG, 140

    @initialize(crowd=CROWDS, depth=st.integers(0, 1))
    def start(self, crowd, depth):
        self.begin(fresh(deterministic_engine(self.name), depth), crowd)

    def alone(self, prompt, kind):
        return deterministic_alone(self.name, prompt, kind)

    def num_same(self, prompt, kind, index, choice, expected):
        count = len(choice.token_ids)
        assert choice.token_ids == expected.token_ids[:count]
        if expected.logprobs is not None:
            self.compare_scores(choice.logprobs or [], expected.logprobs[:count])
        return count

    def compare_scores(self, mine, theirs):
        assert mine == theirs


SCHEDULED = {
    "llama": (Exact, {"model_type": "llama"}, 20),
    "gemma3_text": (Exact, {"model_type": "gemma3_text"}, 12),
    "deterministic": (Deterministic, {"name": "bfloat16"}, 8),
    "deterministic windows": (Deterministic, {"name": "windows"}, 6),
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_under_any_schedule_each_answers_as_if_alone(name):
    machine, attributes, max_examples = SCHEDULED[name]
    run_state_machine_as_test(
        type(machine.__name__, (machine,), attributes),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=15,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", SCHEDULED)
def test_under_a_schedule_with_all_of_it(name, depth):
    """By hand, so that each event is certain to be among them."""
    machine, attributes, _ = SCHEDULED[name]
    schedule = type(machine.__name__, (machine,), attributes)()
    crowds = [[(i + n, kind, i % 2, None, None) for i, kind in enumerate(KINDS)] for n in range(3)]
    # So few letters that drafts are found, and sampled, so that some are wrong.
    crowds.append([(i, "seeded letters", 0, None, None) for i in range(9)])
    options = {"rows": 4, "budget": 24, "chunk": 12, "num_pages": 18, "prefix_cache": True}
    options |= {"decode_steps": 4, "speculation": SPECULATION}
    is_exact = machine is Exact
    schedule.start(crowd=crowds[0], depth=depth, **(options if is_exact else {}))
    schedule.step(count=9)
    schedule.end(schedule.sequences[0], "abort")
    for crowd in crowds[1:]:
        schedule.idle()
        schedule.send_all(crowd=crowd)
    schedule.teardown()
    seen = schedule.seen
    for event in ("together", "aborts", "cached tokens"):
        assert seen[event] > 0, seen
    for event in ("preemptions", "accepted drafts", "wrong drafts"):
        assert (seen[event] > 0) == is_exact, seen
