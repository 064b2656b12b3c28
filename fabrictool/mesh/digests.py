"""What a map is compared by: a digest of the whole and one of each bucket, kept as records come and go.

Digests are sums modulo 2²⁵⁶ of the records' hashes: cheap to keep, independent of order, and not forgeable the way an
XOR of short hashes is (mesh.md §5). Which keys lie in a bucket is kept, too: a repair asks for a few buckets, and must
not walk the whole map for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

BUCKETS = 256
_MODULUS = 1 << 256


class Digests:
    """Of one replica; a key's first octet is its bucket."""

    def __init__(self) -> None:
        self._sum = 0
        self._sums = [0] * BUCKETS
        self._keys: dict[int, set[bytes]] = {}

    def add(self, key: bytes, record_hash: bytes) -> None:
        """A record is in the map now."""
        self._keys.setdefault(key[0], set()).add(key)
        self._count(key[0], int.from_bytes(record_hash, "big"))

    def remove(self, key: bytes, record_hash: bytes) -> None:
        """A record is there no more."""
        self._keys[key[0]].discard(key)
        self._count(key[0], -int.from_bytes(record_hash, "big"))

    def root(self) -> bytes:
        """8 octets that differ when two maps differ; sent with every heartbeat."""
        return self._sum.to_bytes(32, "big")[:8]

    def buckets(self) -> list[bytes]:
        """256 digests of 8 octets."""
        return [value.to_bytes(32, "big")[:8] for value in self._sums]

    def keys(self, buckets: Iterable[int]) -> list[bytes]:
        """The keys in those buckets, in their order."""
        return sorted(key for bucket in set(buckets) for key in self._keys.get(bucket, ()))

    def _count(self, bucket: int, value: int) -> None:
        self._sums[bucket] = (self._sums[bucket] + value) % _MODULUS
        self._sum = (self._sum + value) % _MODULUS
