"""K1: digests do not depend on the process: not on its hash seed, its addresses or its Python."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvharbor.pool.digest

SERVICE = Path(kvharbor.pool.digest.__file__).parents[2]
PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"
PROGRAM = """
from kvharbor.pool.digest import *
planes = [PlaneIdentity(name, 2, "float32", 16, "token_head_dim") for name in ("k", "v")]
tokens = b"".join(token.to_bytes(4, "little") for token in range(1, 9))
digest = namespace_digest("t", pool_identity("m", 1, 4, planes), "", "", b"s")
for start in (0, 16):
    digest = block_digest(digest, tokens[start : start + 16])
    print(digest.hex())
"""
NOT_INSTALLED = 127


def installed_pythons() -> list[str]:
    """Finds the versions that run; a version manager's shim of one that is not installed ends with 127."""
    found = [python for minor in range(11, 15) if (python := shutil.which(f"python3.{minor}"))]
    tried = [(python, subprocess.run([python, "-c", ""], capture_output=True, timeout=60)) for python in found]
    return [sys.executable, *(python for python, ended in tried if ended.returncode != NOT_INSTALLED)]


@pytest.mark.parametrize("python", installed_pythons())
@pytest.mark.parametrize("seed", [None, "0", "12345"])
def test_every_process_computes_the_published_digests(python: str, seed: str | None) -> None:
    """K1: tenant t, salt s, block 4, tokens 1 to 8: the bytes of docs/protocol.md, whatever the hash seed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment["PYTHONPATH"] = str(SERVICE)
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    told = subprocess.run(
        [python, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    published = re.findall(r"\| tokens .* `([0-9a-f]{64})` \|", PROTOCOL.read_text(encoding="utf-8"))
    assert told.stdout.split() == published[:2]
