"""Owners of the physical pages of a paged KV cache: free list and reference counts, on the host.

A row gets pages for the whole length that it may reach when it is admitted, so a running row never
waits for memory. The samples of a group share the full pages of their prompt by counted references;
each of them gets a copy of the last page if that is only part-filled. Page 0 is the null page and
has no owner.

    prompt of 11 tokens, pages of 4:   | 1: full | 2: full | 3: 3 of 4 |
    page table of sample 0             |    1    |    2    | 4: copy of 3 | 5 | ...
    page table of sample 1             |    1    |    2    | 7: copy of 3 | 8 | ...
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any


@dataclasses.dataclass
class PagePool:
    """Free list and reference counts of the physical pages 1 .. num_pages - 1."""

    num_pages: int

    def __post_init__(self) -> None:
        self._free = list(range(1, self.num_pages))
        self._references = [0] * self.num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """The `count` lowest free pages, each with one reference."""
        assert count <= self.num_free, f"{count=} of {self.num_free} free pages"
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """Add one owner to each of `pages`."""
        for page in pages:
            assert self._references[page] > 0, f"{page=} is free"
            self._references[page] += 1

    def release(self, pages: list[int]) -> None:
        """Remove one owner from each of `pages`; a page without owner is free again."""
        for page in pages:
            assert self._references[page] > 0, f"{page=} is free"
            self._references[page] -= 1
            if self._references[page] == 0:
                heapq.heappush(self._free, page)


def pages_for(num_tokens: Any, page_size: int) -> Any:
    """Number of pages that hold num_tokens tokens: an integer, or an integer array of any shape."""
    return -(-num_tokens // page_size)
