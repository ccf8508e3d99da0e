"""Token ids as they travel: little-endian uint32 bytes (docs/decisions/0005)."""

import array
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvharbor.client.errors import InvalidField

TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**32 - 1
_LIMIT = f"integers from 0 to {MAX_TOKEN_ID}"


class TensorLike(Protocol):
    """A torch tensor, known by its shape so that torch is never imported here."""

    def detach(self) -> Any: ...


Tokens = Sequence[int] | npt.NDArray[np.integer[Any]] | bytes | bytearray | memoryview | TensorLike
"""Token ids: a sequence of ints, a flat integer array or tensor, or ready bytes of little-endian uint32."""


def prompt_bytes(tokens: Tokens, field: str = "token_ids") -> bytes:
    """Returns the bytes of at least one token, or raises InvalidField."""
    encoded = token_bytes(tokens, field)
    if not encoded:
        raise InvalidField.of(field, tokens, limit="at least one token", remedy="send a prompt that is not empty")
    return encoded


def token_bytes(tokens: Tokens, field: str = "token_ids") -> bytes:
    """Returns the bytes of any number of tokens; raises InvalidField, naming the first token that is none."""
    if isinstance(tokens, bytes | bytearray | memoryview):
        encoded = bytes(tokens)
        if len(encoded) % TOKEN_BYTES:
            raise InvalidField.of(
                field,
                f"{len(encoded)} bytes",
                limit=f"a multiple of {TOKEN_BYTES} bytes",
                remedy="send each token as a little-endian uint32",
            )
        return encoded
    if isinstance(tokens, np.ndarray):
        return _array_bytes(tokens, field)
    if isinstance(tokens, str):
        raise InvalidField.of(field, tokens, limit=_LIMIT, remedy="tokenize the text first")
    if hasattr(tokens, "detach"):
        return _array_bytes(np.asarray(tokens.detach().cpu().numpy()), field)
    return _sequence_bytes(tokens, field)


def _sequence_bytes(tokens: Sequence[int], field: str) -> bytes:
    # array("I") checks the range of every item in C, five times faster than numpy reads a list.
    try:
        packed = array.array("I", tokens)
    except (TypeError, OverflowError):
        raise _first_mistake(tokens, field) from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _first_mistake(tokens: Sequence[int], field: str) -> InvalidField:
    try:
        for index, token in enumerate(tokens):
            if not isinstance(token, int | np.integer) or not 0 <= token <= MAX_TOKEN_ID:
                return InvalidField.of(f"{field}[{index}]", token, limit=_LIMIT, remedy="send token ids only")
    except TypeError:
        pass
    return InvalidField.of(
        field, tokens, limit=f"a sequence of {_LIMIT}", remedy="send a list, an array, a tensor or bytes"
    )


def _array_bytes(tokens: npt.NDArray[Any], field: str) -> bytes:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidField.of(
            field,
            f"{tokens.dtype} of {tokens.ndim} dimensions",
            limit=f"{_LIMIT}, in one dimension",
            remedy="send one prompt as a flat integer array",
        )
    fits = tokens.dtype.kind == "u" and tokens.dtype.itemsize <= TOKEN_BYTES
    if not fits and tokens.size and (tokens.min() < 0 or tokens.max() > MAX_TOKEN_ID):
        index = int(np.argmax((tokens < 0) | (tokens > MAX_TOKEN_ID)))
        raise InvalidField.of(f"{field}[{index}]", int(tokens[index]), limit=_LIMIT, remedy="send token ids only")
    return tokens.astype("<u4", copy=False).tobytes()
