"""Files of keys for what is sealed at rest."""

import base64
from hashlib import sha256
from pathlib import Path


def write_keys(path: Path, *names: str) -> Path:
    """Write a file with the keys of these names, each always the same. The first one seals."""
    path.touch(0o600)
    path.write_text("".join(base64.b64encode(sha256(name.encode()).digest()).decode() + "\n" for name in names))
    return path
