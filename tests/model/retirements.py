"""What tests of retired versions do to a pool."""

from calls import commit, encode, release

from kvharbor.pool import Pool, Prompt, SequenceView
from kvharbor.pool.steps import finish


def named(tokens: list[int], version: str = "v1", adapter: str = "", salt: bytes = b"") -> Prompt:
    """Returns a prompt of a version."""
    return Prompt(encode(tokens), version=version, adapter=adapter, salt=salt)


def publish(pool: Pool, prompt: Prompt, session: int = 1) -> SequenceView:
    """Allocates and commits a prompt, and holds it."""
    view = finish(pool.allocate(session, prompt))
    commit(pool, view, view.token_count)
    return view


def cache(pool: Pool, prompt: Prompt, session: int = 1) -> None:
    """Leaves a prompt in the cache, held by nobody."""
    release(pool, publish(pool, prompt, session))


def present(pool: Pool, prompt: Prompt, tenant: str = "t") -> int:
    """How many tokens of a prompt are there."""
    return finish(pool.lookup(tenant, prompt)).present_tokens


def retire(pool: Pool, version: str = "v1", tenant: str = "t") -> int:
    """Retires a version with every rule checked after each slice; returns how many slices there were."""
    count = 1
    for _ in pool.retire_version(tenant, version):
        pool.check_invariants()
        count += 1
    pool.check_invariants()
    assert not any(namespace.sweep_count for namespace in pool._state.namespaces)
    return count
