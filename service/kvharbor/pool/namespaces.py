"""Isolation domains of prefixes. Blocks never match across namespaces.

An *exact* namespace knows blocks by their tokens and extra keys. An *opaque* one, which has a scheme, knows them by
32-byte keys that callers compute, each for its block and all before it: the key is a block's content and its digest.

A *retired* one keeps nothing that nobody holds, until somebody uses it anew (`retirement.py`).

[L9] A namespace is in the ledger from the first block published in it until the last has left, under its root node;
the cell is there before the first block's word, and goes after the last one's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

from kvharbor.pool.cells import NO_CELL, CellKind, Cells, Entry
from kvharbor.pool.digest import join_fields, namespace_digest, split_fields

# The second word of a namespace's cell.
_ORDINARY, _RETIRED = 0, 1

# Root nodes share the number space of blocks, far above any block id; never reused.
FIRST_ROOT: Final = 1 << 40
NO_BLOCK: Final = -1

Group = TypeVar("Group")

NamespaceKey = tuple[str, str, str, bytes, str]
"""Tenant, version, adapter, salt and scheme."""


@dataclass(slots=True, eq=False)
class Namespace:
    """One root of the prefix tree. Lives while anything is in it or uses it."""

    root: int
    tenant: str
    key: NamespaceKey
    digest: bytes
    is_opaque: bool
    is_retired: bool = False
    # Retirements that are still going through it.
    sweep_count: int = 0
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
        self._by_version: dict[tuple[str, str], dict[int, Namespace]] = {}
        self.retired_count = 0
        self._next_root = FIRST_ROOT

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_key.values())

    def find(self, tenant: str, version: str, adapter: str, salt: bytes, scheme: str = "") -> Namespace | None:
        """Returns the namespace, or None if nothing is in it: then nothing can match."""
        return self._by_key.get((tenant, version, adapter, salt, scheme))

    def of_version(self, tenant: str, version: str) -> list[Namespace]:
        """Returns the namespaces of a version, whatever their adapter, salt and scheme."""
        return list(self._by_version.get((tenant, version), {}).values())

    def versions_of(self, tenant: str) -> list[str]:
        """Returns the versions that there are namespaces of."""
        return [version for owner, version in self._by_version if owner == tenant]

    def latest_of(self, tenant: str, most: int) -> Iterator[Namespace]:
        """Yields a tenant's namespaces, those made last first."""
        return islice(reversed(self._by_tenant.get(tenant, {}).values()), most)

    def digest_of(self, key: NamespaceKey) -> bytes:
        """Names a namespace, whether it is there or not."""
        return namespace_digest(key[0], self._identity, *key[1:])

    def use(self, tenant: str, version: str, adapter: str, salt: bytes, scheme: str = "") -> Namespace:
        """Returns the namespace, made if need be, with one user more; the caller calls `disuse` once.

        A retired one is an ordinary one again [V2].
        """
        namespace = self.take_up(tenant, version, adapter, salt, scheme)
        if namespace.is_retired:
            self.reinstate(namespace)
        return namespace

    def take_up(self, tenant: str, version: str, adapter: str, salt: bytes, scheme: str = "") -> Namespace:
        """As `use`, for one who has used it before a restart: a retired one stays so."""
        key = (tenant, version, adapter, salt, scheme)
        namespace = self._by_key.get(key)
        if namespace is None:
            namespace = self._make(self._next_root, key)
        namespace.user_count += 1
        return namespace

    def retire(self, namespace: Namespace) -> None:
        """From now on what nobody holds any more is to be freed [V4]. Nothing if it is forgotten already."""
        if not namespace.is_retired and namespace.root in self._by_root:
            self._mark(namespace, is_retired=True)

    def reinstate(self, namespace: Namespace) -> None:
        """Makes a retired namespace an ordinary one."""
        self._mark(namespace, is_retired=False)

    def record(self, namespace: Namespace) -> None:
        """Puts a namespace that is not there yet into the ledger, if there is room."""
        tenant, version, adapter, salt, scheme = namespace.key
        value = join_fields(tenant.encode(), version.encode(), adapter.encode(), salt, scheme.encode())
        words = namespace.root, _RETIRED if namespace.is_retired else _ORDINARY
        namespace.cell = self._cells.write(CellKind.NAMESPACE, value, words)

    def restore(self, entry: Entry) -> Namespace:
        """Takes back what `record` has put into the ledger, with one user; the caller calls `disuse` once."""
        tenant, version, adapter, salt, scheme = split_fields(entry.value)
        key = (tenant.decode(), version.decode(), adapter.decode(), salt, scheme.decode())
        namespace = self._make(entry.words[0], key)
        namespace.cell, namespace.user_count = entry.cell, 1
        if entry.words[1] == _RETIRED:
            namespace.is_retired = True
            self.retired_count += 1
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
                _leave(self._by_tenant, namespace.tenant, namespace.root)
                _leave(self._by_version, namespace.key[:2], namespace.root)
                self.retired_count -= namespace.is_retired

    def at(self, root: int) -> Namespace | None:
        """Returns the namespace of a root node, if it is in use."""
        return self._by_root.get(root)

    def of_root(self, root: int) -> Namespace:
        """Returns the namespace of a root node."""
        return self._by_root[root]

    def _make(self, root: int, key: NamespaceKey) -> Namespace:
        namespace = Namespace(root, tenant=key[0], key=key, digest=self.digest_of(key), is_opaque=bool(key[4]))
        self._next_root = max(self._next_root, root + 1)
        self._by_key[key] = self._by_root[root] = namespace
        self._by_tenant.setdefault(key[0], {})[root] = namespace
        self._by_version.setdefault(key[:2], {})[root] = namespace
        return namespace

    def _mark(self, namespace: Namespace, *, is_retired: bool) -> None:
        if namespace.cell != NO_CELL:
            self._cells.set_word(namespace.cell, 1, _RETIRED if is_retired else _ORDINARY)
        namespace.is_retired = is_retired
        self.retired_count += 1 if is_retired else -1


def _leave(groups: dict[Group, dict[int, Namespace]], group: Group, root: int) -> None:
    members = groups[group]
    del members[root]
    if not members:
        del groups[group]
