"""The page pool: lowest pages first, counted owners, and a random course against a plain model."""

import numpy as np
import pytest

from common.rollout.page_pool import PagePool, pages_for


def test_pages_by_hand():
    pool = PagePool(6)  # page 0 is never handed out
    assert pool.num_free == 5
    assert pool.take(2) == [1, 2] and pool.take(2) == [3, 4]
    pool.release([1, 3])
    assert pool.num_free == 3
    assert pool.take(3) == [1, 3, 5]
    assert pool.take(0) == [] and pool.num_free == 0


def test_a_shared_page_is_free_after_its_last_owner():
    pool = PagePool(3)
    pages = pool.take(2)
    pool.share([1])
    pool.release(pages)
    assert pool.num_free == 1 and pool.take(1) == [2]
    pool.release([1])
    assert pool.num_free == 1 and pool.take(1) == [1]


def test_what_would_corrupt_the_pool_is_an_error():
    pool = PagePool(3)
    with pytest.raises(AssertionError, match="count=3 of 2 free pages"):
        pool.take(3)
    for change in (pool.release, pool.share):
        with pytest.raises(AssertionError, match="page=1 is free"):
            change([1])
    pool.release(pool.take(1))
    with pytest.raises(AssertionError, match="page=1 is free"):
        pool.release([1])


@pytest.mark.parametrize("seed", range(5))
def test_a_random_course_of_owners(seed):
    """Owners hold lists of pages; a page is free if and only if no owner has it."""
    rng, pool, owners = np.random.default_rng(seed), PagePool(20), []
    for _ in range(300):
        kind = rng.integers(3)
        if kind == 0:
            count = int(rng.integers(0, pool.num_free + 1))
            held = {page for owner in owners for page in owner}
            pages = pool.take(count)
            assert pages == sorted(set(range(1, 20)) - held)[:count]
            owners.append(pages)
        elif kind == 1 and owners:
            owners.append(list(owners[rng.integers(len(owners))]))
            pool.share(owners[-1])
        elif owners:
            pool.release(owners.pop(rng.integers(len(owners))))
        assert pool.num_free == 19 - len({page for owner in owners for page in owner})


def test_pages_for():
    assert [pages_for(n, 4) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    assert pages_for(np.array([[1, 4], [5, 0]]), 4).tolist() == [[1, 1], [2, 0]]
