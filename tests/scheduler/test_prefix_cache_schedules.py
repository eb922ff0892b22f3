"""The prefix cache under generated schedules: every visible key is the sequence's own."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from scheduler.builders import PretendDevice, Schedules, make_scheduler, make_sequence
from scheduler.test_prefix_cache import A, B, cached_scheduler, run

from jaxinfer.scheduler.sequence import SequenceStatus


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_random_loads_with_and_without_a_cache_write_the_same(data):
    draw = data.draw
    windows = st.sampled_from([(None,), (None, 6), (5,), (3, None), (9, 2)])
    shared = {
        "page_size": draw(st.sampled_from([1, 3, 4, 8]), "page_size"),
        "windows": draw(windows, "windows"),
        "max_num_seqs": draw(st.integers(1, 5), "rows"),
        "decode_steps": draw(st.integers(1, 4), "decode_steps"),
        "pipeline_depth": draw(st.integers(0, 1), "depth"),
    }
    budget = draw(st.integers(shared["max_num_seqs"], 24), "budget")
    shared |= {"max_num_batched_tokens": budget, "num_pages": 2 + 120 // shared["page_size"]}
    shared["max_prefill_chunk_tokens"] = draw(st.integers(1, budget), "chunk")
    requests = draw(
        st.lists(
            st.tuples(
                st.sampled_from([A, B, A[:9] + B, A[:17] + B[:1] + A]),
                st.integers(1, 30),
                st.integers(0, 12),
                st.booleans(),
            ),
            min_size=1,
            max_size=10,
        ),
        "requests",
    )
    ids, computed = [], []
    for cached in (False, True):
        device = PretendDevice(make_scheduler(**shared, prefix_cache=cached))
        sequences = [
            make_sequence(str(i), prompt=prompt[:length], max_tokens=tokens, prompt_logprobs=scores)
            for i, (prompt, length, tokens, scores) in enumerate(requests)
        ]
        fitting = [s for s in sequences if device.scheduler.fits(s.prompt_len + s.stop.max_tokens)]
        half = len(fitting) // 2
        run(device, *fitting[:half])
        run(device, *fitting[half:])
        assert all(pool.num_used == 0 for pool in device.scheduler.tables.pools)
        assert all(pool.num_free == pool.num_total for pool in device.scheduler.tables.pools)
        ids.append([sequence.token_ids for sequence in sequences])
        computed.append(device.num_computed)
    assert ids[0] == ids[1]


class Engine(Schedules):
    """Arrivals that share prefixes, aborts, faults, a pool that is too small, and clearing."""

    @initialize(
        page_size=st.sampled_from([1, 4, 5]),
        windows=st.sampled_from([(None,), (None, 6), (5,), (3, None), (None, 13)]),
        rows=st.integers(1, 5),
        budget=st.integers(5, 20),
        decode_steps=st.integers(1, 4),
        depth=st.integers(0, 1),
        pages=st.integers(20, 60),
    )
    def start(self, page_size, windows, rows, budget, decode_steps, depth, pages):
        self.scheduler = cached_scheduler(
            page_size=page_size,
            windows=windows,
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            decode_steps=decode_steps,
            pipeline_depth=depth,
            num_pages=2 + max(60, 4 * pages) // page_size,
        )
        self.device = PretendDevice(self.scheduler)
        self.sequences = []

    @rule(
        prompt=st.sampled_from([A, B, A[:9] + B, A[:17] + B[:1] + A]),
        length=st.integers(1, 34),
        max_tokens=st.integers(0, 14),
        stop_ids=st.sampled_from([(), (3,), (1, 7)]),
        priority=st.integers(0, 1),
        scores=st.sampled_from([None, None, 0]),
        salt=st.sampled_from([b"", b"", b"mine"]),
        n=st.sampled_from([1, 1, 3]),
        is_bad=st.sampled_from([False] * 5 + [True]),
    )
    def add(self, prompt, length, max_tokens, scores, n, is_bad, salt, **options):
        for _ in range(n):
            name = f"s{len(self.sequences)}"
            sequence = make_sequence(
                name,
                prompt=prompt[:length],
                max_tokens=max_tokens,
                prompt_logprobs=scores,
                cache_salt=salt,
                stop_ids=options["stop_ids"],
                priority=options["priority"],
            )
            if not self.scheduler.fits(length + max_tokens):
                return
            self.scheduler.add(sequence)
            self.sequences.append(sequence)
            if is_bad and n == 1:
                self.device.spoilt.add(name)

    @precondition(lambda self: getattr(self, "sequences", None))
    @rule(data=st.data(), tail=st.integers(1, 4))
    def follow_up(self, data, tail):
        before = data.draw(st.sampled_from(self.sequences))
        prompt = [*before.token_ids, *range(50, 50 + tail)]
        if self.scheduler.fits(len(prompt) + 5):
            sequence = make_sequence(f"s{len(self.sequences)}", prompt=prompt, max_tokens=5)
            self.scheduler.add(sequence)
            self.sequences.append(sequence)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        run(self.device)
        for sequence in self.sequences:
            assert sequence.status is SequenceStatus.FINISHED
            assert sequence.num_in_flight == 0
            ids = sequence.token_ids[sequence.prompt_len :]
            positions = range(sequence.prompt_len, len(sequence.token_ids))
            assert ids == [position % 13 for position in positions]
            if sequence.finish_reason == "length":
                assert len(ids) == sequence.stop.max_tokens
        for pool in self.scheduler.tables.pools:
            assert pool.num_used == 0
        self.scheduler.clear_prefix_cache()
        assert all(pool.num_idle == 0 for pool in self.scheduler.tables.pools)


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
