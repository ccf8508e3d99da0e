"""Lookup: what of a prompt is there, and why not more."""

from kvharbor.pool import explain, validate
from kvharbor.pool.allocation import reusable_tokens
from kvharbor.pool.explain import Place
from kvharbor.pool.namespaces import NamespaceKey
from kvharbor.pool.results import Presence, Prompt
from kvharbor.pool.state import State
from kvharbor.pool.steps import Steps
from kvharbor.pool.tree import extras_by_block


def lookup(state: State, tenant: str, prompt: Prompt, max_cached_tokens: int | None) -> Steps[Presence]:
    """Tells what is there; holds nothing and changes no recency."""
    token_count = validate.prompt(prompt)
    reusable = reusable_tokens(token_count, max_cached_tokens)
    block_tokens = state.block_tokens
    key = (tenant, prompt.version, prompt.adapter, prompt.salt, "")
    extras = extras_by_block(prompt.extra_keys, block_tokens)
    place = yield from _end_of_match(state, key, prompt.token_ids, extras, token_count // block_tokens)
    present_tokens = place.present_tokens
    usable_tokens = min(present_tokens, reusable // block_tokens * block_tokens)
    is_used = usable_tokens >= state.config.min_reuse_tokens
    miss = None
    if state.history is None:
        pass
    elif usable_tokens and not is_used:
        miss = explain.unused(state, state.history, present_tokens)
    elif present_tokens + block_tokens <= token_count:
        extra = extras.get(present_tokens // block_tokens)
        content = state.tree.content(prompt.token_ids, 4 * present_tokens, extra)
        miss = explain.absent(state, state.history, place, content)
    return Presence(present_tokens, usable_tokens if is_used else 0, miss)


def _end_of_match(
    state: State, key: NamespaceKey, token_ids: bytes, extras: dict[int, bytes], block_count: int
) -> Steps[Place]:
    namespace = state.namespaces.find(*key)
    if namespace is None:
        return Place(key, None, state.namespaces.digest_of(key), 0)
    generation = state.blocks.generation
    node, present = namespace.root, 0
    while True:
        end = min(block_count, present + state.slice_blocks)
        run = state.tree.match(node, token_ids, extras, present, end)
        if run:
            node = run[-1]
        complete = len(run) < end - present or end == block_count
        present += len(run)
        place = Place(key, node, state.tree.digest_of(node), present * state.block_tokens)
        if complete:
            return place
        seen = generation[node]
        yield
        # Nothing is held: if the chain was cut here meanwhile, what follows cannot be told any more.
        if generation[node] != seen:
            return place._replace(node=None)
