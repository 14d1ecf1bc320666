import pytest
from hypothesis import given
from hypothesis import strategies as st

from jserve.engine.pages import PageAllocator, pages_for


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for(tokens, pages):
    assert pages_for(tokens, 16) == pages


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans()), max_size=60))
def test_the_invariant_holds_at_every_step(steps):
    pool = PageAllocator(12)
    held = {owner: [] for owner in range(4)}
    for owner, count, give_back in steps:
        if give_back:
            pool.release(held[owner], owner)
            held[owner] = []
        else:
            pages = pool.allocate(count, owner)
            assert (pages is None) == (count > 12 - sum(map(len, held.values())))
            held[owner] += pages or []
        pool.check(held.items())
        assert pool.free + pool.in_use == 12


def test_a_page_is_given_back_once_and_by_its_owner():
    pool = PageAllocator(3)
    pages = pool.allocate(2, "a")
    with pytest.raises(ValueError, match="held by 'a'"):
        pool.release(pages, "b")
    pool.release(pages, "a")
    with pytest.raises(ValueError, match="held by None"):
        pool.release(pages[:1], "a")


@pytest.mark.parametrize("live", [[], [("a", [0])], [("a", [0, 1]), ("b", [1])], [("b", [0, 1])]])
def test_check_finds_lost_and_shared_pages(live):
    pool = PageAllocator(3)
    assert sorted(pool.allocate(2, "a")) == [0, 1]
    with pytest.raises(RuntimeError):
        pool.check(live)
