"""What a person meets first: help, configuration, mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli.app import app
from cluster.cli.serve import exposure, greeting
from cluster.config.flags import FLAGS
from cluster.config.load import load_config
from cluster.config.schema import ClusterConfig

REPOSITORY = Path(__file__).parents[2]
WIDE = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


@pytest.fixture
def moonpool(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    for name in [name for name in os.environ if name.startswith("MOONPOOL_")]:
        monkeypatch.delenv(name)
    return CliRunner(env=WIDE)


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    script = (
        "import sys; from cluster.cli.app import app\n"
        "try: app(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'ray', 'torch', 'transformers', 'httpx', 'fastapi', 'pydantic', 'zmq'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    times = []
    for _ in range(3):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL, timeout=30)
        times.append(time.monotonic() - began)
    assert min(times) < 0.5


@pytest.mark.parametrize("command", ["serve", "demo", "config"])
def test_help_of_configured_commands_has_every_flag(moonpool: CliRunner, command: str) -> None:
    result = moonpool.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    for flag in [flag for flag, _ in FLAGS.values()] + ["--config", "--set"]:
        assert f" {flag} " in result.output


@pytest.mark.parametrize("arguments", [["-h"], ["chat", "-h"], ["pool", "-h"], ["pool", "drain", "-h"], ["--version"]])
def test_other_help(moonpool: CliRunner, arguments: list[str]) -> None:
    assert moonpool.invoke(app, arguments).exit_code == 0


def test_config_prints_a_file_that_sets_the_same(moonpool: CliRunner, tmp_path: Path) -> None:
    arguments = ["config", "--port", "7", "--reuse", "bitwise", "--set", "pool.dram=64MiB"]
    printed = moonpool.invoke(app, arguments, env={"MOONPOOL_DECODE__BATCH_MAX": "5"})
    assert printed.exit_code == 0
    file = tmp_path / "moonpool.yaml"
    file.write_text(printed.stdout)
    loaded = load_config(file=file, environment={}).config
    assert (
        loaded
        == load_config(
            sets=["gateway.port=7", "model.reuse=bitwise", "pool.dram=64MiB", "decode.batch_max=5"], environment={}
        ).config
    )
    lines = printed.stdout.splitlines()
    assert any(line.split() == ["port:", "7", "#", "flag", "--port"] for line in lines)
    assert any(line.endswith("# environment MOONPOOL_DECODE__BATCH_MAX") for line in lines)


def test_config_never_prints_a_key(moonpool: CliRunner) -> None:
    result = moonpool.invoke(app, ["config", "--set", "gateway.api_keys=hunter2,other"])
    assert "hunter2" not in result.output
    assert "# api_keys: 2 set, not shown" in result.output
    assert "api_keys" not in yaml.safe_load(result.stdout)["gateway"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--set", "gatway.port=1"], "the nearest is 'gateway.port'"),
        (["serve", "--dtype", "int3"], "[flag --dtype]"),
        (["config", "--pool-dram", "much"], "pool.dram: size 'much'"),
        (["demo", "--prefill", "0"], "prefill.workers: Input should be greater than or equal to 1 [flag --prefill]"),
        (["serve", "--config", "/nowhere.yaml"], "file /nowhere.yaml: No such file"),
    ],
)
def test_mistakes_end_with_2_and_say_what_to_mend(moonpool: CliRunner, arguments: list[str], said: str) -> None:
    result = moonpool.invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert said in result.stderr


def test_greeting_can_be_copied() -> None:
    text = greeting("http://127.0.0.1:1", 'ti"ny', keys=True)
    body = text.split("-d '")[1].split("'\n")[0]
    assert json.loads(body)["model"] == 'ti"ny'
    assert "YOUR_KEY" in text
    assert "YOUR_KEY" not in greeting("http://127.0.0.1:1", "tiny", keys=False)


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [("127.0.0.1", (), False), ("localhost", (), False), ("0.0.0.0", (), True), ("0.0.0.0", ("k",), False), ("box", (), True)],
)
def test_an_open_address_without_keys_is_told(host: str, keys: tuple[str, ...], warned: bool) -> None:
    config = ClusterConfig.model_validate({"gateway": {"host": host, "api_keys": keys}})
    assert (exposure(config) is not None) is warned
