"""Isolation domains of prefixes. Blocks never match across namespaces.

[L9] A namespace is in the ledger from the first block published in it until the last has left, under its root node;
the cell is there before the first block's word, and goes after the last one's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvharbor.pool.cells import NO_CELL, CellKind, Cells
from kvharbor.pool.digest import join_fields, namespace_digest, split_fields

# Root nodes share the number space of blocks, far above any block id; never reused.
FIRST_ROOT: Final = 1 << 40
NO_BLOCK: Final = -1

NamespaceKey = tuple[str, str, str, bytes]
"""Tenant, version, adapter and salt."""


@dataclass(slots=True, eq=False)
class Namespace:
    """One root of the prefix tree. Lives while anything is in it or uses it."""

    root: int
    tenant: str
    key: NamespaceKey
    digest: bytes
    first_child: int = NO_BLOCK
    block_count: int = 0
    user_count: int = 0
    cell: int = NO_CELL


class Namespaces:
    """The namespaces in use, by what names them and by root node."""

    def __init__(self, identity: bytes, cells: Cells) -> None:
        self._identity = identity
        self._cells = cells
        self._by_key: dict[NamespaceKey, Namespace] = {}
        self._by_root: dict[int, Namespace] = {}
        # In the order of their making.
        self._by_tenant: dict[str, dict[int, Namespace]] = {}
        self._next_root = FIRST_ROOT

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_key.values())

    def find(self, tenant: str, version: str, adapter: str, salt: bytes) -> Namespace | None:
        """Returns the namespace, or None if nothing is in it: then nothing can match."""
        return self._by_key.get((tenant, version, adapter, salt))

    def latest_of(self, tenant: str, most: int) -> Iterator[Namespace]:
        """Yields a tenant's namespaces, those made last first."""
        return islice(reversed(self._by_tenant.get(tenant, {}).values()), most)

    def digest_of(self, key: NamespaceKey) -> bytes:
        """Names a namespace, whether it is there or not."""
        return namespace_digest(key[0], self._identity, *key[1:])

    def use(self, tenant: str, version: str, adapter: str, salt: bytes) -> Namespace:
        """Returns the namespace, made if need be, with one user more; the caller calls `disuse` once."""
        key = (tenant, version, adapter, salt)
        namespace = self._by_key.get(key)
        if namespace is None:
            namespace = self._make(self._next_root, key)
        namespace.user_count += 1
        return namespace

    def record(self, namespace: Namespace) -> None:
        """Puts a namespace that is not there yet into the ledger, if there is room."""
        version, adapter, salt = namespace.key[1:]
        value = join_fields(namespace.tenant.encode(), version.encode(), adapter.encode(), salt)
        namespace.cell = self._cells.write(CellKind.NAMESPACE, value, (namespace.root, 0))

    def restore(self, root: int, value: bytes, cell: int) -> Namespace:
        """Takes back what `record` has put into the ledger, with one user; the caller calls `disuse` once."""
        tenant, version, adapter, salt = split_fields(value)
        namespace = self._make(root, (tenant.decode(), version.decode(), adapter.decode(), salt))
        namespace.cell, namespace.user_count = cell, 1
        return namespace

    def disuse(self, namespace: Namespace) -> None:
        """Ends one use; an empty namespace that nobody uses is forgotten."""
        namespace.user_count -= 1
        self.forget_if_empty(namespace)

    def forget_if_empty(self, namespace: Namespace) -> None:
        """Forgets the namespace if nothing is in it: in the ledger, and here too if nobody uses it."""
        if not namespace.block_count:
            if namespace.cell != NO_CELL:
                self._cells.free(namespace.cell)
                namespace.cell = NO_CELL
            if not namespace.user_count:
                del self._by_key[namespace.key]
                del self._by_root[namespace.root]
                own = self._by_tenant[namespace.tenant]
                del own[namespace.root]
                if not own:
                    del self._by_tenant[namespace.tenant]

    def of_root(self, root: int) -> Namespace:
        """Returns the namespace of a root node."""
        return self._by_root[root]

    def _make(self, root: int, key: NamespaceKey) -> Namespace:
        namespace = Namespace(root=root, tenant=key[0], key=key, digest=self.digest_of(key))
        self._next_root = max(self._next_root, root + 1)
        self._by_key[key] = self._by_root[root] = namespace
        self._by_tenant.setdefault(key[0], {})[root] = namespace
        return namespace
