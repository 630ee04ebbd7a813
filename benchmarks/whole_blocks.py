"""vLLM plug-in for the capacity benchmark's arm `whole`: Manthan drops whole blocks, and never cuts refinements.

An arm is a server set-up under comparison. A refinement is a part at a compressed block's end that can be cut off.
"""

from pathlib import Path

from manthan.manager.session.manager import SessionManager

DISTRIBUTION = "manthan_whole_blocks"
PLUGIN = f"[vllm.general_plugins]\n{DISTRIBUTION} = {__name__}:install\n"


def install() -> None:
    """Make a full tier in this process drop whole blocks, not refinements."""
    SessionManager._trim_until = lambda *_: None  # type: ignore[method-assign]


def write_plugin(folder: Path) -> Path:
    """Write the plug-in's description, which vLLM finds in folders of PYTHONPATH. Return the folder to put there."""
    info = folder / "whole-blocks" / f"{DISTRIBUTION}-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(PLUGIN)
    return info.parent.absolute()
