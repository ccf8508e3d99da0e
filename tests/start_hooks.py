"""Code that a service process runs before its own, by the interpreter's means: nothing of it is in the product."""

import os
from pathlib import Path


def environment(folder: Path, code: str) -> dict[str, str]:
    """Returns the variables for a process that runs `code` when its interpreter starts, from a file in `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
