"""The physical KV pages of one group of layers. Page 0 is the trash page and never leaves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping


class PagePool:
    """Hands out pages 1 .. num_pages-1, and remembers what is in those that were published.

    A page is free; or used, by one or more sequences; or idle: used by none, its content kept under
    its key until a page is needed, the one idle for longest first.

    Invariant: `num_free + num_used == num_total`, where idle pages count as free.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is reserved), got {num_pages}")
        self.num_total = num_pages - 1
        self._free = list(range(num_pages - 1, 0, -1))
        self._users: dict[int, int] = {}  # page -> sequences that hold it
        self._idle: OrderedDict[int, None] = OrderedDict()  # idle for longest first
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages held by sequences."""
        return len(self._users)

    @property
    def num_idle(self) -> int:
        """Pages that nobody holds and whose content is kept."""
        return len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Returns `count` pages of unknown content; forgets idle ones if too few are free.

        Raises:
          ValueError: fewer are free; ask `num_free` first.
        """
        if count > self.num_free:
            raise ValueError(f"{count} pages asked for, {self.num_free} are free")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._users.update(dict.fromkeys(pages, 1))
        return pages

    def acquire(self, page: int) -> None:
        """Counts one more sequence that holds a page, which is used or idle.

        Raises:
          ValueError: the page is free: its content is unknown.
        """
        if page in self._idle:
            del self._idle[page]
        elif page not in self._users:
            raise ValueError(f"page {page} is free")
        self._users[page] = self._users.get(page, 0) + 1

    def release(self, pages: list[int]) -> None:
        """Takes back pages of one sequence; of those that become idle, the last goes first.

        What starts a prompt is shared by more prompts than what ends it.

        Raises:
          ValueError: a page is not in use.
        """
        for page in reversed(pages):
            users = self._users.get(page)
            if users is None:
                raise ValueError(f"page {page} is not in use")
            if users > 1:
                self._users[page] = users - 1
                continue
            del self._users[page]
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def publish(self, page: int, key: bytes) -> None:
        """Keeps the content of a used page under a key; does nothing where the key has a page.

        Raises:
          ValueError: the page is not in use, or has another key.
        """
        if page not in self._users:
            raise ValueError(f"page {page} is not in use")
        if key in self._page_of:
            return
        if page in self._key_of:
            raise ValueError(f"page {page} has another key")
        self._key_of[page] = key
        self._page_of[key] = page

    def lookup(self, key: bytes) -> int | None:
        """Returns the page that holds what was published under a key."""
        return self._page_of.get(key)

    def forget(self, keys: list[bytes]) -> None:
        """Drops keys, where they have a page: nobody else will find it."""
        for key in keys:
            page = self._page_of.pop(key, None)
            if page is None:
                continue
            del self._key_of[page]
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)

    def clear(self) -> None:
        """Drops every key: idle pages become free, used ones will when they are released."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._key_of.clear()
        self._page_of.clear()

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page

    def check_integrity(self, users: Mapping[int, int] | None = None) -> None:
        """Raises AssertionError unless every page is exactly once free, idle or used.

        Args:
          users: how many sequences hold each page in use, if that is known.
        """
        assert users is None or users == self._users
        pages = [*self._free, *self._idle, *self._users]
        assert sorted(pages) == list(range(1, self.num_total + 1))
        assert self.num_free + self.num_used == self.num_total
        assert all(count > 0 for count in self._users.values())
        assert self._idle.keys() <= self._key_of.keys()
        assert self._key_of.keys() <= self._idle.keys() | self._users.keys()
        assert {key: page for page, key in self._key_of.items()} == self._page_of
