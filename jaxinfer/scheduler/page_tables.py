"""Gives sequences the pages their tokens need, per KV group, and takes back what a window left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from jaxinfer.scheduler.page_pool import PagePool
from jaxinfer.scheduler.plan import PageUpdate
from jaxinfer.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The pages of one group of layers: how many, and the window beyond which they are dead."""

    num_pages: int
    window: int | None = None


class PageTables:
    """Pages of all sequences in all KV groups."""

    def __init__(self, groups: SequenceOf[GroupSpec], page_size: int) -> None:
        self.groups = tuple(groups)
        self.page_size = page_size
        self.pools = [PagePool(group.num_pages) for group in groups]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def most_pages(self, num_tokens: int, chunk: int, group: GroupSpec) -> int:
        """Pages a sequence of `num_tokens` holds at most, computed in steps of `chunk` tokens."""
        pages = self.pages_for(num_tokens)
        if group.window is None:
            return pages
        return min(pages, self.pages_for(group.window + chunk) + 1)

    def fits_empty(self, num_tokens: int, chunk: int) -> bool:
        """Whether a sequence of this length fits when it is alone."""
        return all(
            self.most_pages(num_tokens, chunk, group) <= pool.num_total
            for group, pool in zip(self.groups, self.pools, strict=True)
        )

    def fits_now(self, sequence: Sequence, num_tokens: int, chunk: int) -> bool:
        """Whether a sequence finds room for this length beside what others and itself hold."""
        return all(
            self.most_pages(num_tokens, chunk, group) - len(pages) + pages.count(0) <= pool.num_free
            for group, pool, pages in zip(self.groups, self.pools, sequence.pages, strict=True)
        )

    def fits_beside(self, sequence: Sequence, others: SequenceOf[Sequence], chunk: int) -> bool:
        """Whether a sequence can be finished whatever others come to need until they end."""
        everyone = (sequence, *others)
        for index, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            wanted = sum(self.most_pages(one.max_num_tokens, chunk, group) for one in everyone)
            if group.window is None:
                held, room = sum(len(one.pages[index]) for one in everyone), pool.num_free
            else:
                # A shared page that one's window leaves is not free, and the one needs another.
                held, room = 0, pool.num_total
            if wanted - held > room:
                return False
        return True

    def first_visible(self, group: int, position: int) -> int:
        """Index of the first page that a query at `position`, or behind it, can see."""
        window = self.groups[group].window
        # A query at position p sees keys j > p - window.
        return 0 if window is None else max(0, position - window + 1) // self.page_size

    def release_outside_window(self, sequence: Sequence, position: int) -> None:
        """Takes back pages that no query from `position` on can see.

        Steps run in order on the device, so a page freed here is rewritten only after every
        dispatched step has read it.
        """
        for group, (pool, pages) in enumerate(zip(self.pools, sequence.pages, strict=True)):
            for index in range(self.first_visible(group, position) - 1, -1, -1):
                if index < len(pages):
                    if pages[index] == 0:
                        break
                    pool.release([pages[index]])
                    pages[index] = 0

    def holds(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the sequence has the pages for its first `num_tokens` tokens."""
        return num_tokens <= len(sequence.pages[0]) * self.page_size

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages per group still needed to hold `num_tokens` tokens."""
        return max(0, self.pages_for(num_tokens) - len(sequence.pages[0]))

    def can_extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether `extend` would succeed."""
        count = self.missing(sequence, num_tokens)
        return all(count <= pool.num_free for pool in self.pools)

    def extend(self, sequence: Sequence, num_tokens: int) -> list[PageUpdate]:
        """Gives the sequence pages for its first `num_tokens` tokens; returns the new entries."""
        count = self.missing(sequence, num_tokens)
        updates = []
        for group, (pool, pages) in enumerate(zip(self.pools, sequence.pages, strict=True)):
            for page in pool.allocate(count):
                updates.append(PageUpdate(group, sequence.row, len(pages), page))
                pages.append(page)
        return updates

    def shrink(self, sequence: Sequence, num_tokens: int) -> None:
        """Takes back the pages behind the sequence's first `num_tokens` tokens."""
        kept = self.pages_for(num_tokens)
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            pool.release(pages[kept:])
            del pages[kept:]

    def release(self, sequence: Sequence) -> None:
        """Takes back all of a sequence's pages."""
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            pool.release([page for page in pages if page])
        sequence.pages = [[] for _ in self.groups]

    def check_integrity(self, sequences: SequenceOf[Sequence]) -> None:
        """Raises AssertionError unless exactly the pages of `sequences` are in use."""
        for group, pool in enumerate(self.pools):
            pool.check_integrity(
                Counter(page for sequence in sequences for page in sequence.pages[group] if page)
            )
