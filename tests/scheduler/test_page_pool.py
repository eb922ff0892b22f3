import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.scheduler.page_pool import PagePool


@given(st.integers(2, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
def test_free_and_used_always_add_up(num_pages, moves):
    pool = PagePool(num_pages)
    held = []
    for takes, count in moves:
        if takes and count <= pool.num_free:
            pages = pool.allocate(count)
            assert 0 not in pages
            assert not set(pages) & set(held)
            held += pages
        elif not takes:
            pool.release(held[:count])
            held = held[count:]
        pool.check_integrity()
        assert pool.num_free + pool.num_used == pool.num_total == num_pages - 1
        assert pool.num_used == len(held)


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
