"""KV pages of earlier sequences, found again by the tokens that led to them.

The key of a page is a hash of its token ids and of the key before it, so that one key stands for
all tokens up to its page's end.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b

from jaxinfer.scheduler.page_tables import PageTables
from jaxinfer.scheduler.sequence import Sequence

KEY_BYTES = 16


@dataclass(slots=True)
class _Claim:
    """What a running sequence has published, and what it was admitted to publish.

    Attributes:
      published: its pages before this index are, or need not be.
      announced: others wait for its pages before this index.
    """

    published: int
    announced: int


class PrefixCache:
    """Finds and publishes the pages of sequences, in all KV groups at once.

    Args:
      tables: the pages.
      salt: stands for all that changes keys and values beside the tokens.
      chunk_tokens: where the bits of what is in a page depend on which tokens were computed with
        it, the tokens of a chunk: only whole chunks of prompts are published and taken over. None
        where all full pages are.
    """

    def __init__(
        self, tables: PageTables, salt: bytes = b"", chunk_tokens: int | None = None
    ) -> None:
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._tables = tables
        self._chunk_tokens = chunk_tokens
        # Pages that are taken over together.
        self._unit = 1 if chunk_tokens is None else chunk_tokens // tables.page_size
        self._salt = _hash(salt)
        self._claims: dict[Sequence, _Claim] = {}
        self._announced: Counter[bytes] = Counter()

    # Of waiting sequences.

    def find(self, sequence: Sequence) -> int | None:
        """Returns how many pages the sequence can take over, or None where it should wait.

        That is while a running sequence is computing the page behind them. At least one token is
        left to compute; everything is where the prompt is to be scored or embedded.
        """
        if sequence.computes_all:
            return 0
        if sequence.awaited_key in self._announced:
            return None
        sequence.awaited_key = None
        found = self._num_found(sequence)
        # A page that ends where the tokens do is not taken over, so nobody waits for it.
        if (found + self._unit) * self._tables.page_size < len(sequence.token_ids):
            key = sequence.page_keys[found]
            if key in self._announced:
                sequence.awaited_key = key
                return None
        return found

    def _num_found(self, sequence: Sequence) -> int:
        """Pages that are there; those that a window hides need not be."""
        page_size = self._tables.page_size
        most = (len(sequence.token_ids) - 1) // page_size // self._unit * self._unit
        runs = [0] * len(self._tables.groups)
        best = 0
        for index, key in enumerate(self._keys(sequence, most)):
            for group, pool in enumerate(self._tables.pools):
                runs[group] = 0 if pool.lookup(key) is None else runs[group] + 1
                if runs[group] == 0 and self._tables.groups[group].window is None:
                    return best
            num_pages = index + 1
            if num_pages % self._unit == 0 and all(
                run >= num_pages - self._tables.first_visible(group, num_pages * page_size)
                for group, run in enumerate(runs)
            ):
                best = num_pages
        return best

    def _num_publishable(self, sequence: Sequence, num_tokens: int) -> int:
        """Full pages of a sequence's first `num_tokens` tokens that others may take over."""
        if self._chunk_tokens is not None:
            num_tokens = min(num_tokens, sequence.prompt_len)
            num_tokens -= num_tokens % self._chunk_tokens
        return num_tokens // self._tables.page_size

    # Of running sequences.

    def take(self, sequence: Sequence, num_pages: int) -> None:
        """Gives a sequence, which holds no pages, the first pages of its tokens."""
        keys = sequence.page_keys[:num_pages]
        for group, pool in enumerate(self._tables.pools):
            first = self._tables.first_visible(group, num_pages * self._tables.page_size)
            pages = [pool.lookup(key) for key in keys[first:]]
            for page in pages:
                assert page is not None, "it was found a moment ago"
                pool.acquire(page)
                sequence.pages[group].append(page)
            sequence.pages[group][:0] = [0] * first

    def admit(self, sequence: Sequence) -> None:
        """Notes that a sequence runs, and which pages others need not compute beside it."""
        num_taken = len(sequence.pages[0])
        num_known = self._num_publishable(sequence, len(sequence.token_ids))
        self._announced.update(self._keys(sequence, num_known)[num_taken:])
        self._claims[sequence] = _Claim(num_taken, num_known)
        if sequence.num_admissions == 1 and not sequence.computes_all:
            sequence.num_cached = num_taken * self._tables.page_size
            self.num_queried_tokens += sequence.prompt_len
            self.num_hit_tokens += sequence.num_cached

    def publish(self, sequence: Sequence) -> None:
        """Publishes the full pages of the tokens whose computation is confirmed."""
        claim = self._claims.get(sequence)
        num_full = self._num_publishable(sequence, sequence.num_confirmed)
        if claim is None or num_full <= claim.published:
            return
        keys = self._keys(sequence, num_full)
        for pool, pages in zip(self._tables.pools, sequence.pages, strict=True):
            for index in range(claim.published, num_full):
                if pages[index]:
                    pool.publish(pages[index], keys[index])
        self._withdraw(keys[claim.published : min(num_full, claim.announced)])
        claim.published = num_full

    def leave(self, sequence: Sequence) -> None:
        """Notes that a sequence publishes nothing any more."""
        claim = self._claims.pop(sequence, None)
        if claim is not None:
            self._withdraw(sequence.page_keys[claim.published : claim.announced])

    def distrust(self, sequence: Sequence) -> None:
        """Forgets the pages of a sequence, its own and what it took: one of them may be spoilt."""
        self.leave(sequence)
        for pool in self._tables.pools:
            pool.forget(sequence.page_keys)

    def clear(self) -> None:
        """Forgets everything; what now runs publishes nothing any more."""
        for sequence in list(self._claims):
            self.leave(sequence)
        for pool in self._tables.pools:
            pool.clear()

    def _withdraw(self, keys: list[bytes]) -> None:
        for key in keys:
            self._announced[key] -= 1
            if not self._announced[key]:
                del self._announced[key]

    def _keys(self, sequence: Sequence, count: int) -> list[bytes]:
        """Returns the keys of the first `count` full pages; each is computed once."""
        keys, page_size = sequence.page_keys, self._tables.page_size
        key = keys[-1] if keys else _hash(self._salt + sequence.cache_salt)
        for start in range(len(keys) * page_size, count * page_size, page_size):
            token_ids = sequence.token_ids[start : start + page_size]
            key = _hash(key + array("i", token_ids).tobytes())
            keys.append(key)
        return keys if len(keys) == count else keys[:count]

    def check_integrity(self, running: list[Sequence]) -> None:
        """Raises AssertionError unless just what running sequences will publish is announced."""
        assert self._claims.keys() <= set(running)
        announced: Counter[bytes] = Counter()
        for sequence, claim in self._claims.items():
            assert claim.published * self._tables.page_size <= sequence.num_confirmed
            announced.update(sequence.page_keys[claim.published : claim.announced])
        assert announced == self._announced


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=KEY_BYTES).digest()
