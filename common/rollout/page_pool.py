"""Who owns which physical page of a paged KV cache: free list and reference counts, on the host.

Pages are handed out at admission for the whole length a row may reach, so a running row never waits
for memory. Full prompt pages are shared by the samples of a group (counted references); the
part-filled last prompt page is copied to each of them. Page 0 is the null page, owned by nobody.
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
        """One more owner for each of `pages`."""
        for page in pages:
            assert self._references[page] > 0, f"{page=} is free"
            self._references[page] += 1

    def release(self, pages: list[int]) -> None:
        """One owner less; pages without owner are free again."""
        for page in pages:
            assert self._references[page] > 0, f"{page=} is free"
            self._references[page] -= 1
            if self._references[page] == 0:
                heapq.heappush(self._free, page)


def pages_for(num_tokens: Any, page_size: int) -> Any:
    """Pages that hold num_tokens tokens; an integer, or an integer array of any shape."""
    return -(-num_tokens // page_size)
