import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.runner.buckets import MAX_CPU_PROGRAMS, MAX_PROGRAMS, Ladders, make_ladders

limits = st.one_of(st.integers(1, 40), st.integers(1, 1 << 17))


@given(
    platform=st.sampled_from(["cpu", "gpu", "tpu"]),
    seqs=limits,
    extra=limits,
    bulk=st.one_of(st.integers(0, 3), limits),
    verifies=st.booleans(),
)
def test_ladders(platform, seqs, extra, bulk, verifies):
    budget = seqs - 1 + extra
    ladders = make_ladders(platform, seqs, budget, bulk, verifies)
    first_rows, first_tokens = 1, 16
    if platform == "cpu":
        first_rows, first_tokens = 2, max(2, min(16 if verifies else 64, budget))
    for ladder, limit, smallest in [
        (ladders.decode, seqs, first_rows),
        (ladders.tokens, budget, first_tokens),
    ]:
        assert list(ladder) == sorted(set(ladder)), "ascending"
        assert ladder[-1] == max(limit, smallest), "the top rung is the limit"
        assert ladder[0] == (smallest if limit > smallest else ladder[-1])
    assert ladders.bulk == ladders.decode[: len(ladders.bulk)]
    assert bool(ladders.bulk) == bool(bulk)
    if bulk:
        assert ladders.bulk[-1] == ladders.decode_rung(min(bulk, seqs)), "those rows, and no more"
    programs = len(ladders.decode) + len(ladders.bulk) + len(ladders.tokens) + 1
    assert programs <= (MAX_CPU_PROGRAMS if platform == "cpu" else MAX_PROGRAMS)


@given(platform=st.sampled_from(["cpu", "gpu"]), limit=st.integers(1, 600), data=st.data())
def test_every_size_has_the_smallest_rung_that_holds_it(platform, limit, data):
    ladders = make_ladders(platform, limit, limit)
    size = data.draw(st.integers(1, limit))
    for ladder, rung in [
        (ladders.decode, ladders.decode_rung(size)),
        (ladders.tokens, ladders.token_rung(size)),
    ]:
        assert rung in ladder
        assert rung >= size
        assert all(other < size for other in ladder if other < rung)


def test_one_sequence_and_one_token():
    assert make_ladders("cpu", 1, 1).decode == (2,), "XLA:CPU is slow at one row"
    assert make_ladders("cpu", 1, 1).tokens == (2,)
    assert make_ladders("gpu", 1, 1).decode == (1,)
    assert make_ladders("gpu", 1, 1).tokens == (16,)


def test_the_usual_ladders():
    assert make_ladders("cpu", 32, 512).decode == (2, 16, 32)
    assert make_ladders("cpu", 32, 512).tokens == (64, 256, 512)
    assert make_ladders("cpu", 32, 512, 2) == Ladders((2, 16, 32), (64, 256, 512), (2,))
    assert make_ladders("cpu", 32, 256, 2, True) == Ladders((2, 16, 32), (16, 64, 256), (2,))
    assert make_ladders("cpu", 32, 512, 32) == Ladders((2, 32), (64, 256, 512), (2, 32))
    assert make_ladders("gpu", 32, 4096).decode == (1, 2, 4, 8, 16, 32)
    assert make_ladders("gpu", 32, 4096).tokens == (16, 64, 256, 1024, 4096)


def test_one_rung_is_the_limit_in_whole_lanes():
    one = {"one_rung": True}
    assert make_ladders("cpu", 32, 256, 2, **one) == Ladders((32,), (256,))
    assert make_ladders("gpu", 33, 4097, **one) == Ladders((48,), (4112,))
    assert make_ladders("cpu", 1, 1, **one) == Ladders((16,), (16,))
    assert make_ladders("tpu", 5, 17, **one) == Ladders((16,), (32,))


def test_a_step_above_the_limit_is_refused():
    with pytest.raises(ValueError, match="a step of 9 is above the top rung 8"):
        make_ladders("cpu", 8, 16).decode_rung(9)
