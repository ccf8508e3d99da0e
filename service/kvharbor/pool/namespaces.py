"""Isolation domains of prefixes. Blocks never match across namespaces."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvharbor.pool.digest import namespace_digest

# Root nodes share the number space of blocks, far above any block id; never reused.
FIRST_ROOT: Final = 1 << 40
NO_BLOCK: Final = -1


@dataclass(slots=True, eq=False)
class Namespace:
    """One root of the prefix tree. Lives while anything is in it or uses it."""

    root: int
    tenant: str
    key: tuple[str, str, str, bytes]
    digest: bytes
    first_child: int = NO_BLOCK
    block_count: int = 0
    user_count: int = 0


class Namespaces:
    """The namespaces in use, by what names them and by root node."""

    def __init__(self, identity: bytes) -> None:
        self._identity = identity
        self._by_key: dict[tuple[str, str, str, bytes], Namespace] = {}
        self._by_root: dict[int, Namespace] = {}
        self._next_root = FIRST_ROOT

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_key.values())

    def find(self, tenant: str, version: str, adapter: str, salt: bytes) -> Namespace | None:
        """Returns the namespace, or None if nothing is in it: then nothing can match."""
        return self._by_key.get((tenant, version, adapter, salt))

    def use(self, tenant: str, version: str, adapter: str, salt: bytes) -> Namespace:
        """Returns the namespace, made if need be, with one user more; the caller calls `disuse` once."""
        key = (tenant, version, adapter, salt)
        namespace = self._by_key.get(key)
        if namespace is None:
            digest = namespace_digest(tenant, self._identity, version, adapter, salt)
            namespace = Namespace(root=self._next_root, tenant=tenant, key=key, digest=digest)
            self._next_root += 1
            self._by_key[key] = self._by_root[namespace.root] = namespace
        namespace.user_count += 1
        return namespace

    def disuse(self, namespace: Namespace) -> None:
        """Ends one use; an empty namespace that nobody uses is forgotten."""
        namespace.user_count -= 1
        self.forget_if_empty(namespace)

    def forget_if_empty(self, namespace: Namespace) -> None:
        """Forgets the namespace if nothing is in it and nobody uses it."""
        if not namespace.user_count and not namespace.block_count:
            del self._by_key[namespace.key]
            del self._by_root[namespace.root]

    def of_root(self, root: int) -> Namespace:
        """Returns the namespace of a root node."""
        return self._by_root[root]
