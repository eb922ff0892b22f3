"""The incremental index proposes what a search through all tokens would."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.scheduler.ngram import FIRST_LENGTH, MOST_IDLE_TOKENS, NGRAM_SIZES, NgramDrafter

MOST = 9


def naive(tokens, count):
    """What followed the latest earlier occurrence of the last tokens, going round at the end."""
    for size in NGRAM_SIZES:
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                drafts = list(tokens[end:])
                while len(drafts) < count:
                    drafts += tokens[end:]
                return tuple(drafts[:count])
    return ()


@settings(max_examples=300, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), max_size=20),
    output=st.lists(st.lists(st.sampled_from([0, 1, 2, 3, 2**31 - 1]), max_size=5), max_size=20),
    count=st.integers(1, FIRST_LENGTH),
)
def test_proposes_what_a_search_finds(prompt, output, count):
    drafter = NgramDrafter(MOST, prompt)
    tokens = list(prompt)
    for confirmed in output:
        drafter.extend(confirmed)
        tokens += confirmed
        assert drafter.propose(count) == naive(tokens, count)
        assert drafter.has_drafts == bool(naive(tokens, count))


def test_longer_matches_come_first():
    drafter = NgramDrafter(MOST, [1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3])
    assert drafter.propose(1) == (50,)


def test_a_repetition_is_guessed_to_go_on():
    assert NgramDrafter(MOST, [7, 1, 2, 1]).propose(3) == ()
    drafter = NgramDrafter(MOST, [7, 1, 2, 1, 2, 1])
    drafter.learn(2, 2)
    assert drafter.propose(3) == (2, 1, 2)


def test_right_drafts_are_followed_by_more_and_wrong_ones_by_few():
    drafter = NgramDrafter(MOST, list(range(40)) * 2)
    lengths = []
    for _ in range(3):
        drafts = drafter.propose(MOST)
        lengths.append(len(drafts))
        drafter.learn(len(drafts), len(drafts))
    assert lengths == [2, 5, 9]
    drafter.learn(9, 4)
    assert len(drafter.propose(MOST)) == FIRST_LENGTH


def test_drafts_cut_short_do_not_make_the_next_shorter():
    drafter = NgramDrafter(MOST, list(range(40)) * 2)
    drafter.learn(7, 7)
    drafter.learn(1, 1)
    assert len(drafter.propose(MOST)) == MOST


def test_wrong_drafts_are_tried_again_later_and_later():
    drafter = NgramDrafter(MOST, [5] * 10)
    waits = []
    for _ in range(8):
        assert drafter.has_drafts
        drafter.learn(3, 0)
        drafter.extend([5])  # the token that was sampled instead
        wait = 0
        while not drafter.has_drafts:
            assert drafter.propose(3) == ()
            drafter.extend([5])
            wait += 1
        waits.append(wait)
    assert waits == [1, 2, 4, 8, 16, 32, MOST_IDLE_TOKENS, MOST_IDLE_TOKENS]
    drafter.learn(3, 1)
    assert drafter.has_drafts


def test_a_limit_of_one_token():
    drafter = NgramDrafter(1, [1, 2, 3, 4, 1, 2, 3])
    assert drafter.propose(5) == (4,)
