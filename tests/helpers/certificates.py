"""A CA and certificates that it has signed, made with openssl."""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest


class Certificate(NamedTuple):
    """Paths of a certificate and its key."""

    cert: str
    key: str


class Authority:
    """A CA whose files are in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed")
        self._folder = folder
        self.files = self._paths(name)
        self._openssl("req", "-x509", *self._new(name), "-days", "2", "-out", self.files.cert)

    def sign(self, name: str) -> Certificate:
        """A certificate for this name, on 127.0.0.1 and localhost."""
        files = self._paths(name)
        names = self._folder / "names.txt"
        names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        request = str(self._folder / f"{name}.csr")
        self._openssl("req", *self._new(name), "-out", request)
        by = ("-CA", self.files.cert, "-CAkey", self.files.key, "-CAcreateserial")
        self._openssl("x509", "-req", "-in", request, *by, "-days", "2", "-extfile", str(names), "-out", files.cert)
        return files

    def _paths(self, name: str) -> Certificate:
        return Certificate(str(self._folder / f"{name}.crt"), str(self._folder / f"{name}.key"))

    def _new(self, name: str) -> tuple[str, ...]:
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", self._paths(name).key)
        return (*key, "-subj", f"/CN={name}")

    def _openssl(self, *args: str) -> None:
        subprocess.run(["openssl", *args], check=True, capture_output=True)
