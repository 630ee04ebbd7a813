#!/usr/bin/env python3
"""Runs the steps of deploy/Dockerfile in a fresh root, without a daemon, and packs and tries what is there then.

    .ci/rootfs.py OUT [--base TAR]

OUT gets manthan-rootfs-VERSION.tar.gz. --base is the root of vLLM's image (`docker export`). A registry may be out of
reach, so without it the base is Debian's Python with uv and no vLLM: that tries the steps, and is no server.
It needs root and, without --base, mmdebstrap. The same commit, base and packages give the same bytes.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
MOUNT = re.compile(r"--mount=type=bind,from=(\w+),source=(\S+),target=(\S+)\s+")
EMPTY = ("dev", "proc", "sys", "tmp", "run", "var/cache", "var/log")
"""Folders whose content is not packed."""


class Step(NamedTuple):
    """Instruction of a Dockerfile, with its arguments."""

    name: str
    text: str


@dataclass
class Stage:
    """Root that a FROM begins. user: as whom the image runs."""

    root: Path
    folder: str = "/"
    user: str = "0:0"
    env: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})


def steps(dockerfile: str) -> Iterator[Step]:
    """Yield the instructions, with lines joined and without comments."""
    lines = "\n".join(line for line in dockerfile.splitlines() if not line.startswith("#"))
    for line in lines.replace("\\\n", " ").splitlines():
        if line.strip():
            yield Step(*line.split(maxsplit=1))


class Builder:
    """Stages of a Dockerfile in folders of `work`. Each begins as a copy of `base`."""

    def __init__(self, work: Path, base: Path, epoch: str) -> None:
        self.work, self.base, self.epoch = work, base, epoch
        self.stages: dict[str, Stage] = {}

    def build(self, dockerfile: str) -> Stage:
        """Run all steps and return the last stage."""
        for step in steps(dockerfile):
            say(f"{step.name} {step.text}")
            if step.name != "ARG":  # of which there is only the base
                getattr(self, f"_{step.name.lower()}", self._unknown)(step.text)
        return self.stage

    def _unknown(self, text: str) -> None:
        raise SystemExit(f"rootfs: no such instruction is known here: {text}")

    def _from(self, text: str) -> None:
        name = text.partition(" AS ")[2] or "image"
        self.stage = self.stages[name] = Stage(self.work / name)
        run("cp", "--archive", "--reflink=auto", self.base, self.stage.root)

    def _workdir(self, text: str) -> None:
        self.stage.folder = text
        self._inside(text).mkdir(parents=True, exist_ok=True)

    def _copy(self, text: str) -> None:
        """Copy the context: what .dockerignore does not leave out."""
        assert text == ". ."
        ignored = (REPO / "deploy" / "Dockerfile.dockerignore").read_text(encoding="utf-8")
        kept = re.findall(r"^!(\S+)$", ignored, re.MULTILINE)
        archive = subprocess.run(["git", "archive", "HEAD", *kept], cwd=REPO, capture_output=True, check=True).stdout
        subprocess.run(["tar", "x", "-C", self._inside(self.stage.folder)], input=archive, check=True)

    def _run(self, text: str) -> None:
        mounts = [(self.stages[name].root / source.strip("/"), target) for name, source, target in MOUNT.findall(text)]
        mounts += [(Path(file), file) for file in (CERTIFICATES, "/etc/resolv.conf")]
        enter(self.stage, ["sh", "-c", MOUNT.sub("", text)], {"SOURCE_DATE_EPOCH": self.epoch}, mounts)

    def _env(self, text: str) -> None:
        self.stage.env |= dict(pair.split("=", 1) for pair in shlex.split(text))

    def _user(self, text: str) -> None:
        self.stage.user = text

    def _inside(self, folder: str) -> Path:
        return self.stage.root / folder.strip("/")


def enter(
    stage: Stage, command: list[str], env: dict[str, str] | None = None, mounts: list[tuple[Path, str]] | None = None
) -> str:
    """Run a command in a stage, and return its output. Mounts are gone afterwards, and so are targets that it made."""
    made = [target for _, target in mounts or () if not (stage.root / target.strip("/")).exists()]
    script = ['mount --rbind /dev "$0/dev" && mount -t proc proc "$0/proc"']
    for source, target in mounts or ():
        at = shlex.quote(str(stage.root / target.strip("/")))
        make = f"mkdir -p {at}" if source.is_dir() else f"mkdir -p $(dirname {at}) && touch {at}"
        script.append(f"{{ [ -e {at} ] || {{ {make}; }}; }} && mount --bind {shlex.quote(str(source))} {at}")
    given = [f"{name}={value}" for name, value in ({"SSL_CERT_FILE": CERTIFICATES} | stage.env | (env or {})).items()]
    inside = ["chroot", f"--userspec={stage.user}", str(stage.root), "env", "-i", "-C", stage.folder, *given, *command]
    script.append(f"exec {shlex.join(inside)}")
    words = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", " && ".join(script), stage.root]
    done = subprocess.run(words, capture_output=True, text=True)
    for target in made:
        path = stage.root / target.strip("/")
        path.rmdir() if path.is_dir() else path.unlink()
    if done.returncode:
        raise SystemExit(f"rootfs: {shlex.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def make_base(root: Path, work: Path) -> None:
    """Make the root of a Debian with what the steps need of vLLM's image: Python, uv and the user `vllm`."""
    run(
        "mmdebstrap", "--quiet", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", "bookworm", root
    )
    for of_this_machine in ("etc/resolv.conf", "etc/hostname"):
        (root / of_this_machine).unlink(missing_ok=True)
    for mark in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        mark.unlink()
    run(sys.executable, "-m", "pip", "install", "-qq", "--target", work / "uv", "uv")
    shutil.copy(work / "uv" / "bin" / "uv", root / "usr" / "local" / "bin" / "uv")
    run("chroot", root, "useradd", "--uid", "2000", "--gid", "0", "--create-home", "vllm")


def pack(root: Path, to: Path, epoch: str) -> None:
    """Write an archive whose bytes depend on the files only. None is newer than the commit."""
    for note in root.glob("usr/local/lib/python3*/*-packages/*.dist-info/uv_cache.json"):  # when its wheel was made
        record = note.with_name("RECORD")
        kept = [line for line in record.read_text().splitlines(True) if note.name not in line]
        record.write_text("".join(kept))
        note.unlink()
    left_out = [f"--exclude=./{folder}/*" for folder in EMPTY]
    order = ["--sort=name", "--numeric-owner", f"--mtime=@{epoch}", "--clamp-mtime", "--format=posix"]
    order += ["--pax-option=delete=atime,delete=ctime"]
    run("tar", "--create", f"--file={to}", "--use-compress-program=gzip -n", *order, *left_out, "-C", root, ".")


def try_it(image: Stage, version: str) -> None:
    """Run the command as the image's user."""
    assert "Usage" in enter(image, ["manthan", "--help"])
    assert enter(image, ["manthan", "version"]).split()[-1] == version
    found = enter(image, ["sh", "-c", "manthan doctor || true"])
    assert "vLLM" in found, found
    assert enter(image, ["sh", "-c", "touch /var/lib/manthan/written && rm /var/lib/manthan/written"]) == ""


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True)


def say(what: str) -> None:
    print("==", what, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", type=Path)
    asked = parser.parse_args()
    version = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    ask = ["git", "log", "-1", "--format=%ct"]
    epoch = subprocess.run(ask, cwd=REPO, capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        base = work / "base"
        if asked.base:
            base.mkdir()
            run("tar", "xf", asked.base, "-C", base)
        else:
            say("making a base of Debian's packages in the place of vLLM's image")
            make_base(base, work)
        image = Builder(work, base, epoch).build((REPO / "deploy" / "Dockerfile").read_text(encoding="utf-8"))
        to = asked.out / f"manthan-rootfs-{version}.tar.gz"
        pack(image.root, to, epoch)
        say("trying it")
        try_it(image, version)
    say(f"{to}, {to.stat().st_size >> 20} MiB")


if __name__ == "__main__":
    main()
