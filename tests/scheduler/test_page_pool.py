import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.scheduler.page_pool import PagePool


@given(st.integers(2, 40), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=40))
def test_every_page_is_free_idle_or_used(num_pages, moves):
    pool = PagePool(num_pages)
    held, content = [], {}  # one entry per user; key -> page, until the page is handed out again
    for move, number in moves:
        chosen = held[number % len(held)] if held else None
        if move == 0 and number <= pool.num_free:
            pages = pool.allocate(number)
            assert 0 not in pages
            assert not set(pages) & set(held)
            held += pages
            content = {key: page for key, page in content.items() if page not in pages}
        elif move == 1:
            pool.release(held[:number])
            held = held[number:]
        elif move == 2 and chosen is not None and chosen not in content.values():
            key = bytes([number])
            pool.publish(chosen, key)
            content.setdefault(key, chosen)
        elif move == 3 and (page := pool.lookup(bytes([number]))) is not None:
            pool.acquire(page)
            held.append(page)
        elif move == 4:
            pool.forget([bytes([number])])
            content.pop(bytes([number]), None)
        elif move == 5 and number == 0:
            pool.clear()
            content = {}
        pool.check_integrity({page: held.count(page) for page in held})
        assert pool.num_free + pool.num_used == pool.num_total == num_pages - 1
        assert pool.num_used == len(set(held))
        assert {key: pool.lookup(key) for key in content} == content
        assert pool.num_idle == len(set(content.values()) - set(held))


def test_more_than_free_is_refused():
    pool = PagePool(4)
    with pytest.raises(ValueError, match="4 pages asked for, 3 are free"):
        pool.allocate(4)


def test_releasing_twice_is_refused():
    pool = PagePool(4)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(ValueError, match="not in use"):
        pool.release(pages)


def test_a_pool_needs_a_page_beside_the_trash_page():
    with pytest.raises(ValueError, match="at least 2"):
        PagePool(1)


def published(pool, keys):
    """Allocates a page for each key and publishes it."""
    pages = pool.allocate(len(keys))
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key)
    return pages


def test_idle_pages_are_taken_last_and_the_one_idle_for_longest_first():
    pool = PagePool(6)  # 5
    first, second = published(pool, [b"a", b"b"]), published(pool, [b"c", b"d"])
    pool.release(second)
    pool.release(first)
    assert (pool.num_free, pool.num_idle) == (5, 4)
    pool.allocate(1)
    assert pool.num_idle == 4, "a free page went first"
    # What was released first goes first, and of that the last page.
    for gone in (b"d", b"c", b"b", b"a"):
        assert pool.lookup(gone) is not None
        pool.allocate(1)
        assert pool.lookup(gone) is None


def test_an_idle_page_that_is_acquired_is_safe():
    pool = PagePool(3)  # 2
    pages = published(pool, [b"a", b"b"])
    pool.release(pages)
    pool.acquire(pages[0])
    pool.allocate(1)
    assert (pool.lookup(b"a"), pool.lookup(b"b")) == (pages[0], None)
    pool.acquire(pages[0])
    pool.release([pages[0]])
    assert pool.num_used == 2, "one of two users is left"


def test_what_is_free_cannot_be_acquired_nor_published():
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(ValueError, match=f"page {page} is free"):
        pool.acquire(page)
    with pytest.raises(ValueError, match=f"page {page} is not in use"):
        pool.publish(page, b"a")


def test_a_key_has_one_page_and_a_page_one_key():
    pool = PagePool(4)
    one, other = pool.allocate(2)
    pool.publish(one, b"a")
    pool.publish(other, b"a")
    assert pool.lookup(b"a") == one
    pool.release([other])
    assert pool.num_idle == 0, "the page without a key is free"
    with pytest.raises(ValueError, match=f"page {one} has another key"):
        pool.publish(one, b"b")
