"""PrefixTree: found by exactly its content, behind exactly its prefix."""

from kvharbor.pool.digest import ExtraKey, block_digest
from kvharbor.pool.namespaces import NO_BLOCK, Namespace, Namespaces
from kvharbor.pool.tree import PrefixTree, extras_by_block
from trees import new_tree, publish

SIZE = 4


def insert(tree: PrefixTree, block: int, parent: int, content: bytes, space: Namespace) -> int | None:
    """Publishes one block; returns who holds the content."""
    publish(tree, [block], parent, [content], space)
    return tree.find(parent, content)


def make() -> tuple[PrefixTree, Namespaces]:
    tree, namespaces, _ = new_tree()
    return tree, namespaces


def test_a_run_ends_at_the_first_block_that_is_missing() -> None:
    """[G1] The match is contiguous from where it starts."""
    tree, namespaces = make()
    space = namespaces.use("t", "", "", b"")
    assert insert(tree, 3, space.root, b"aaaa", space) == 3
    assert insert(tree, 5, 3, b"bbbb", space) == 5
    assert tree.match(space.root, b"aaaabbbbcccc", {}, 0, 3) == [3, 5]
    assert tree.match(space.root, b"bbbb", {}, 0, 1) == []
    assert tree.match(3, b"aaaabbbb", {}, 1, 2) == [5]
    assert tree.match(space.root, b"aaaabbbb", {}, 0, 0) == []


def test_content_that_is_there_names_its_holder() -> None:
    """[P7] The second to insert a content learns whose it is, and changes nothing."""
    tree, namespaces = make()
    space = namespaces.use("t", "", "", b"")
    insert(tree, 3, space.root, b"aaaa", space)
    assert insert(tree, 4, space.root, b"aaaa", space) == 3
    assert (tree.block_count, space.block_count, tree.parent[4]) == (1, 1, NO_BLOCK)


def test_an_extra_key_is_part_of_the_content() -> None:
    """[G1] Equal token ids with another extra key, offset or none at all are other content."""
    tree, namespaces = make()
    space = namespaces.use("t", "", "", b"")
    extras = extras_by_block([ExtraKey(0, b"image")], 1)
    insert(tree, 1, space.root, tree.content(b"aaaa", 0, extras[0]), space)
    assert tree.match(space.root, b"aaaa", extras, 0, 1) == [1]
    assert tree.match(space.root, b"aaaa", {}, 0, 1) == []
    assert tree.match(space.root, b"aaaa", extras_by_block([ExtraKey(0, b"imagf")], 1), 0, 1) == []
    assert tree.content_of(1) == b"aaaa" + extras[0]


def test_extra_keys_cannot_be_taken_for_one_another() -> None:
    """[G1] Offset and length are part of the encoding, so lists of keys never share bytes."""
    one = extras_by_block([ExtraKey(4, b"ab"), ExtraKey(4, b"c")], 4)
    other = extras_by_block([ExtraKey(4, b"a"), ExtraKey(4, b"bc")], 4)
    shifted = extras_by_block([ExtraKey(5, b"ab"), ExtraKey(5, b"c")], 4)
    assert one.keys() == other.keys() == shifted.keys() == {1}
    assert len({one[1], other[1], shifted[1]}) == 3


def test_namespaces_do_not_share() -> None:
    """[G1] The same content under another tenant, version, adapter, salt or scheme is elsewhere."""
    tree, namespaces = make()
    spaces = [
        namespaces.use(*key)
        for key in (
            ("t", "", "", b""),
            ("u", "", "", b""),
            ("t", "v", "", b""),
            ("t", "", "v", b""),
            ("t", "", "", b"v"),
            ("t", "", "", b"", "v"),
        )
    ]
    assert [space.is_opaque for space in spaces] == [False] * 5 + [True]
    for block, space in enumerate(spaces):
        content = b"aaaa" * 8 if space.is_opaque else b"aaaa"
        assert insert(tree, block, space.root, content, space) == block
    assert len({space.digest for space in spaces}) == len(spaces)
    assert len({tree.digest_of(block) for block in range(len(spaces))}) == len(spaces)


def test_siblings_leave_in_any_order() -> None:
    """First, middle and last of several children go, and the rest is still listed."""
    for order in ((1, 2, 3), (3, 2, 1), (2, 1, 3), (2, 3, 1)):
        tree, namespaces = make()
        space = namespaces.use("t", "", "", b"")
        insert(tree, 9, space.root, b"head", space)
        for parent in (9, space.root):
            for block in (1, 2, 3):
                insert(tree, block, parent, bytes([block] * SIZE), space)
            left = [3, 2, 1]
            for gone in order:
                tree.remove_all([gone])
                left.remove(gone)
                assert [child for child in tree.children(parent) if child != 9] == left


def test_descend_visits_parents_before_children() -> None:
    """Every block below a node, once, each behind its parent."""
    tree, namespaces = make()
    space = namespaces.use("t", "", "", b"")
    for block, parent in ((1, space.root), (2, 1), (3, 1), (4, 3), (5, space.root)):
        insert(tree, block, parent, bytes([block] * SIZE), space)
    seen = list(tree.descend(space.root))
    assert sorted(seen) == [1, 2, 3, 4, 5]
    assert seen.index(1) < seen.index(3) < seen.index(4)
    assert sorted(tree.descend(1)) == [2, 3, 4]


def test_a_digest_is_chained_from_the_namespace() -> None:
    """The digest of a block is that of its parent and its content, hashed."""
    tree, namespaces = make()
    space = namespaces.use("t", "", "", b"")
    insert(tree, 1, space.root, b"aaaa", space)
    insert(tree, 2, 1, b"bbbb", space)
    first = block_digest(space.digest, b"aaaa")
    assert (tree.digest_of(1), tree.digest_of(2)) == (first, block_digest(first, b"bbbb"))
    assert tree.digest_of(space.root) == space.digest


def test_an_empty_namespace_is_forgotten_with_its_last_user_or_block() -> None:
    """[G9] Namespaces live while something is in them or uses them, and no longer."""
    tree, namespaces = make()
    space = namespaces.use("t", "", "", b"")
    assert namespaces.use("t", "", "", b"") is space
    insert(tree, 1, space.root, b"aaaa", space)
    namespaces.disuse(space)
    namespaces.disuse(space)
    assert namespaces.find("t", "", "", b"") is space
    tree.remove_all([1])
    assert namespaces.find("t", "", "", b"") is None
    assert len(namespaces) == 0
    assert (tree.match(space.root, b"aaaa", {}, 0, 1), tree.find(space.root, b"aaaa")) == ([], None)
    again = namespaces.use("t", "", "", b"")
    assert (again.root != space.root, again.digest == space.digest) == (True, True)
    namespaces.disuse(again)
    assert list(namespaces) == []


def test_a_chain_is_published_up_to_what_is_there_already() -> None:
    """[P7] A chain stops at the first content that another block holds, and says how far it came."""
    tree, namespaces = make()
    space = namespaces.use("t", "", "", b"")
    published = publish(tree, [1, 2, 3], space.root, [b"aaaa", b"bbbb", b"cccc"], space)
    assert [tree.digest_of(block) for block in (1, 2, 3)] == published
    assert publish(tree, [4, 5], space.root, [b"aaaa", b"dddd"], space) == []
    assert len(publish(tree, [5, 6], 1, [b"dddd", b"eeee"], space)) == 2
    assert (list(tree.children(1)), list(tree.children(5))) == ([5, 2], [6])


def test_an_opaque_block_is_named_by_its_key() -> None:
    """[G1] In an opaque namespace the key is content and digest; it is matched behind its parent, as any content."""
    tree, namespaces = make()
    exact, opaque = namespaces.use("t", "", "", b""), namespaces.use("t", "", "", b"", "engine/sha256")
    keys = [bytes([number]) * 32 for number in range(4)]
    assert publish(tree, [1, 2, 3], opaque.root, keys[:3], opaque) == keys[:3]
    assert [tree.digest_of(block) for block in (1, 2, 3)] == keys[:3]
    joined = b"".join(keys)
    assert tree.match(opaque.root, joined, {}, 0, 4) == [1, 2, 3]
    assert tree.match(1, joined, {}, 1, 4) == [2, 3]
    assert tree.match(opaque.root, joined, {}, 1, 4) == []
    assert tree.match(exact.root, joined, {}, 0, 4) == []
    assert tree.digest_of(opaque.root) != tree.digest_of(exact.root)


def test_removal_tells_the_digests_by_namespace() -> None:
    """[G8] What is gone is told by the namespace, and so the tenant, whose it was, in order."""
    tree, namespaces = make()
    mine, theirs = namespaces.use("t", "", "", b""), namespaces.use("u", "", "", b"")
    first, second = publish(tree, [1, 2], mine.root, [b"aaaa", b"bbbb"], mine)
    (other,) = publish(tree, [3], theirs.root, [b"aaaa"], theirs)
    assert tree.remove_all([2, 1, 3]) == [(mine, [second, first]), (theirs, [other])]
    assert (tree.block_count, mine.block_count, theirs.block_count) == (0, 0, 0)
    assert tree.find(mine.root, b"aaaa") is None
