"""The physical KV pages of one group of layers. Page 0 is the trash page and never leaves."""

from __future__ import annotations


class PagePool:
    """Hands out pages 1 .. num_pages-1.

    Invariant: `num_free + num_used == num_total`, and no page is both free and used.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is reserved), got {num_pages}")
        self.num_total = num_pages - 1
        self._free = list(range(num_pages - 1, 0, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages held by sequences."""
        return len(self._used)

    def allocate(self, count: int) -> list[int]:
        """Returns `count` free pages.

        Raises:
          ValueError: fewer are free; ask `num_free` first.
        """
        if count > len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def release(self, pages: list[int]) -> None:
        """Takes pages back.

        Raises:
          ValueError: a page is not in use.
        """
        for page in pages:
            if page not in self._used:
                raise ValueError(f"page {page} is not in use")
            self._used.remove(page)
            self._free.append(page)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is exactly once free or used."""
        assert self.num_free + self.num_used == self.num_total
        assert set(self._free).isdisjoint(self._used)
        assert set(self._free) | self._used == set(range(1, self.num_total + 1))
