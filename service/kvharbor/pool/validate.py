"""The caller's arguments, checked before anything changes."""

from typing import Final

from kvharbor.pool.block_runs import BlockRun, Chain
from kvharbor.pool.digest import OPAQUE_KEY_BYTES, ExtraKey
from kvharbor.pool.errors import InvalidField
from kvharbor.pool.hints import NO_HINTS, Hints
from kvharbor.pool.results import Prompt

MAX_NAME_BYTES: Final = 128
MAX_KEY_BYTES: Final = 256
# What a call lists is bounded, as each entry costs about a microsecond in which nobody else is served.
MAX_EXTRA_KEYS: Final = 1 << 14
MAX_SWITCHED: Final = 1 << 16
# Extra keys of one block, encoded. They are kept as long as it is: much more would be a way to fill the host's memory.
EXTRA_BYTES_A_TOKEN: Final = 64
LEAST_EXTRA_BYTES: Final = 4096
# Entries of all block tables in one reply: it fits in a message, and is made within some ten milliseconds.
MAX_TABLE_BLOCKS: Final = 1 << 19
MAX_PRIORITY: Final = 100
MAX_RETENTION_S: Final = 365 * 86400
# Far above any pool, far below what the arithmetic on it could overflow in another language.
MAX_TOKENS: Final = 1 << 48


def token_count(token_ids: bytes, field: str) -> int:
    """Returns how many tokens there are; refuses bytes that are not whole uint32 values."""
    count, rest = divmod(len(token_ids), 4)
    if rest:
        raise InvalidField(
            field=field,
            value=f"{len(token_ids)} bytes long",
            limit="a multiple of 4 bytes",
            remedy="encode each token as a little-endian uint32",
        )
    return count


def prompt(asked: Prompt) -> int:
    """Returns the number of tokens of a valid prompt."""
    count = token_count(asked.token_ids, "token_ids")
    if not count:
        raise InvalidField(field="token_ids", value="empty", limit="at least one token", remedy="a prompt needs tokens")
    namespace(asked.version, asked.adapter, asked.salt)
    if asked.extra_keys:
        extra_keys(asked.extra_keys, 0, count)
    hints(asked.hints)
    return count


def namespace(version: str, adapter: str, salt: bytes, scheme: str = "") -> None:
    """Checks the parts of a namespace that the caller chooses."""
    text("version", version, MAX_KEY_BYTES)
    text("adapter", adapter, MAX_KEY_BYTES)
    if len(salt) > MAX_KEY_BYTES:
        _too_long("salt", len(salt), MAX_KEY_BYTES)
    if scheme:
        text("scheme", scheme)


def chain(asked: Chain, block_tokens: int) -> int:
    """Returns the number of blocks of a valid chain."""
    namespace(asked.version, asked.adapter, asked.salt, asked.scheme)
    hints(asked.hints)
    if not asked.scheme:
        _absent("keys", asked.keys, "name their scheme")
        count = token_count(asked.token_ids, "token_ids")
        extra_keys(asked.extra_keys, 0, count)
        return _whole("token_ids", count, block_tokens, "tokens")
    _absent("token_ids", asked.token_ids, "a namespace with a scheme has keys")
    _absent("extra_keys", asked.extra_keys, "a namespace with a scheme has keys")
    return _whole("keys", len(asked.keys), OPAQUE_KEY_BYTES, "bytes")


def hints(asked: Hints) -> None:
    """Checks what a caller expects of the blocks that it publishes."""
    if asked is NO_HINTS:
        return
    if abs(asked.priority) > MAX_PRIORITY:
        raise InvalidField(
            field="hints.priority",
            value=asked.priority,
            limit=f"{-MAX_PRIORITY} to {MAX_PRIORITY}",
            remedy="say how important the request is within that range",
        )
    if not 0 <= asked.retention_s <= MAX_RETENTION_S:
        raise InvalidField(
            field="hints.retention",
            value=asked.retention_s,
            limit=f"0 to {MAX_RETENTION_S} s",
            remedy="say for how long the prompt will be of use, or leave it out",
        )


def run(field: str, blocks: BlockRun) -> None:
    """Checks a list of blocks, each of which has a generation."""
    table(field, len(blocks), len(blocks), "spread them over several calls")
    if len(blocks.generations) != len(blocks):
        raise InvalidField(
            field=f"{field}.generations",
            value=f"{len(blocks.generations)} entries",
            limit=f"{len(blocks)} entries, one a block",
            remedy="send each block with its generation",
        )


def _absent(field: str, value: bytes | tuple[ExtraKey, ...], remedy: str) -> None:
    if value:
        raise InvalidField(field=field, value=f"{len(value)} long", limit="empty in this namespace", remedy=remedy)


def _whole(field: str, count: int, size: int, unit: str) -> int:
    blocks, rest = divmod(count, size)
    if rest:
        raise InvalidField(
            field=field,
            value=f"{count} {unit}",
            limit=f"whole blocks of {size} {unit}",
            remedy="leave out what fills no block",
        )
    return blocks


def listed(field: str, entry_count: int, most: int) -> None:
    """Checks the length of a list."""
    if entry_count > most:
        raise InvalidField(
            field=field,
            value=f"{entry_count} entries",
            limit=f"at most {most} entries",
            remedy="spread them over several calls",
        )


def table(field: str, value: int, entry_count: int, remedy: str) -> None:
    """Checks how long the block tables would be that a call with this value is answered with."""
    if entry_count > MAX_TABLE_BLOCKS:
        raise InvalidField(
            field=field,
            value=f"{value}, for tables of {entry_count} blocks",
            limit=f"tables of at most {MAX_TABLE_BLOCKS} blocks in a reply",
            remedy=remedy,
        )


def extra_keys(keys: tuple[ExtraKey, ...], first_token: int, end_token: int) -> None:
    """Checks that keys lie in [first_token, end_token), in order, each with a value."""
    previous = first_token
    for key in keys:
        if not previous <= key.token_offset < end_token:
            raise InvalidField(
                field="extra_keys.token_offset",
                value=key.token_offset,
                limit=f"in order within [{previous}, {end_token})",
                remedy="sort the keys and count from the start of the sequence",
            )
        if not 1 <= len(key.value) <= MAX_KEY_BYTES:
            raise InvalidField(
                field="extra_keys.value",
                value=f"{len(key.value)} bytes long",
                limit=f"1 to {MAX_KEY_BYTES} bytes",
                remedy="use a content hash",
            )
        previous = key.token_offset


def block_extra(encoded: bytes, block_tokens: int) -> bytes:
    """Returns the encoded extra keys of a block as they are; refuses more than are kept of one."""
    most = max(EXTRA_BYTES_A_TOKEN * block_tokens, LEAST_EXTRA_BYTES)
    if len(encoded) > most:
        raise InvalidField(
            field="extra_keys",
            value=f"{len(encoded)} bytes in one block, 16 for each key and its value",
            limit=f"at most {most} bytes",
            remedy="hash the keys of a block together",
        )
    return encoded


def text(field: str, value: str, limit: int = MAX_NAME_BYTES) -> None:
    """Checks the length of a name."""
    try:
        length = len(value.encode())
    except UnicodeEncodeError as lone:
        raise InvalidField(
            field=field,
            value=f"not encodable at character {lone.start}",
            limit="text that UTF-8 can encode",
            remedy="decode it with errors='strict' where it comes from",
        ) from None
    if length > limit:
        _too_long(field, length, limit)


def tokens(field: str, value: int, *, least: int = 0, most: int = MAX_TOKENS) -> int:
    """Checks a number of tokens."""
    if not least <= value <= most:
        raise InvalidField(
            field=field,
            value=value,
            limit=f"{least} to {most}",
            remedy="give a number of tokens in that range",
        )
    return value


def _too_long(field: str, length: int, limit: int) -> None:
    raise InvalidField(
        field=field,
        value=f"{length} bytes long",
        limit=f"at most {limit} bytes",
        remedy="shorten it, or hash it",
    )
