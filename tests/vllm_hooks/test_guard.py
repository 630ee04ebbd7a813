"""The guard in a real engine: what the codec does to the model's own KV is measured before any session goes cold."""

import json
from pathlib import Path
from typing import Any

import pytest
from biased_model import with_biased_keys
from scripts import run_script
from vllm_engine import MODEL

SCRIPT = "exact_sessions.py"


def run(model: str, codec: str, **more: Any) -> dict[str, Any]:
    """A session that goes cold and returns three times, and then goes cold once more."""
    manthan = {
        "min_tokens": 64,
        "idle_after_s": 3600,
        "codec": {"name": codec, "sink_tokens": 4} | more,
        "cold_store": {"max_bytes": "64MiB"},
    }
    job = {"what": ["grow", "codecs"], "blocks": 131, "manthan": manthan, "model": model}
    out, err = run_script(SCRIPT, job)
    report: dict[str, Any] = json.loads(out)
    return report | {"log": [line for line in err.splitlines() if "Manthan: codec" in line]}


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_biased_keys(tmp_path_factory.mktemp("biased"), bias=100.0)


@pytest.mark.slow
def test_a_codec_that_is_faithful_is_kept_and_the_log_says_how_faithful() -> None:
    found = run(MODEL, "k3v3")
    assert found["codecs"] == ["exact", "k3v3"]
    [line] = found["log"]
    assert "INFO" in line
    assert "codec k3v3 is faithful on this model: k3v3 adds 0.0" in line
    assert found["gauges"]["codec_fallback"] == {"": 0.0}
    assert 0.001 < found["gauges"]["codec_noise"]["logits"] < 0.05
    assert all(found["right"])
    assert found["failures"] == []


def test_with_biased_keys_a_finer_codec_is_used_and_what_returns_is_right(biased: str) -> None:
    found = run(biased, "k3v3")
    assert found["codecs"] == ["exact", "k4v4c"]
    assert found["ordered"] == ["k4v4c"]
    [line] = found["log"]
    assert "WARNING" in line
    assert "codec k3v3 is not faithful on this model, and k4v4c is used instead" in line
    assert found["gauges"]["codec_fallback"] == {"": 1.0}
    assert found["gauges"]["codec_noise"]["logits"] > 0.2
    assert all(found["right"])
    assert found["failures"] == []
    assert all(now["restored"] > 16 for now in found["rounds"])
    assert found["usage"]["cold_bytes"] == sum(found["bounds"]) == found["usage"]["used"]
    assert 3.3 < found["gauges"]["compression_ratio"][""] < 3.8


@pytest.mark.slow
def test_without_the_guard_biased_keys_are_destroyed(biased: str) -> None:
    """So it is the guard that makes the answers right."""
    found = run(biased, "k3v3", guard=False)
    assert found["codecs"] == ["exact", "k3v3"]
    assert found["log"] == []
    assert found["gauges"]["codec_noise"] == {}
    assert not all(found["right"])


def test_where_no_codec_is_faithful_all_tokens_are_kept_exact(tmp_path: Path) -> None:
    """Values with a bias, for which there is no remedy yet. Whatever the model makes of it, its KV comes back."""
    found = run(with_biased_keys(tmp_path, bias=0.0, of_values=200.0), "k3v3")
    assert found["codecs"] == ["exact"]
    [line] = found["log"]
    assert "codec k3v3 is not faithful on this model, and all tokens are kept exact; choose another" in line
    assert found["gauges"]["codec_fallback"] == {"": 1.0}
    assert set(found["stored"]["exact"]) == {32}
    assert 0.95 < found["gauges"]["compression_ratio"][""] < 1.0
    assert found["failures"] == []
    for now in found["rounds"]:
        assert now["restored"] > 16
        assert now["same"][: 32 * now["restored"]] == list(range(32 * now["restored"]))


@pytest.mark.slow
def test_a_codec_that_bears_biased_keys_is_kept(biased: str) -> None:
    found = run(biased, "k4v2c")
    assert found["codecs"] == ["exact", "k4v2c"]
    assert "codec k4v2c is faithful on this model" in found["log"][0]
    assert all(found["right"])
