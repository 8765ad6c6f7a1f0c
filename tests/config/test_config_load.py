"""Where settings come from, which one wins, and what a person is told about one that is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from cluster.config.errors import ConfigError
from cluster.config.keys import ENV_OTHERS, env_name, known_fields, nearest_env, nearest_key
from cluster.config.load import load_config
from cluster.config.schema import SECRETS, SIZES, ClusterConfig, ClusterSettings
from cluster.config.sources import Setting


def problems(**arguments: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(**({"environment": {}} | arguments))  # type: ignore[arg-type]
    return caught.value.problems


def written(folder: Path, text: str) -> Path:
    path = folder / "moonpool.yaml"
    path.write_text(text)
    return path


def test_defaults_are_valid_and_their_origin_is_default() -> None:
    loaded = load_config(environment={})
    assert loaded.config == ClusterConfig()
    assert set(loaded.origins) == set(known_fields())
    assert set(loaded.origins.values()) == {"default"}


def test_flag_beats_environment_beats_file_beats_command_default(tmp_path: Path) -> None:
    file = written(tmp_path, "gateway:\n  port: 1001\n  n_max: 5\nprefill:\n  workers: 3\n")
    environment = {"MOONPOOL_GATEWAY__PORT": "1002", "MOONPOOL_GATEWAY__N_MAX": "6"}
    defaults = [Setting(key, 9, "demo") for key in ("gateway.port", "gateway.n_max", "prefill.workers", "decode.workers")]
    flags = [Setting("gateway.port", 1003, "flag --port")]
    loaded = load_config(flags=flags, file=file, environment=environment, defaults=defaults)
    assert (loaded.value("gateway.port"), loaded.origins["gateway.port"]) == (1003, "flag --port")
    assert (loaded.value("gateway.n_max"), loaded.origins["gateway.n_max"]) == (6, "environment MOONPOOL_GATEWAY__N_MAX")
    assert (loaded.value("prefill.workers"), loaded.origins["prefill.workers"]) == (3, f"file {file} line 5")
    assert (loaded.value("decode.workers"), loaded.origins["decode.workers"]) == (9, "demo")
    assert loaded.origins["pool.dram"] == "default"


def test_set_beats_environment_and_reaches_every_setting() -> None:
    loaded = load_config(sets=["pool.dram=64MiB", "model.reuse = bitwise"], environment={"MOONPOOL_POOL__DRAM": "1GiB"})
    assert loaded.value("pool.dram") == "64MiB"
    assert loaded.value("model.reuse") == "bitwise"
    assert loaded.origins["pool.dram"] == "flag --set pool.dram"


def test_file_named_by_the_environment(tmp_path: Path) -> None:
    file = written(tmp_path, "decode:\n  batch_max: 7\n")
    assert load_config(environment={"MOONPOOL_CONFIG": str(file)}).config.decode.batch_max == 7


def test_every_setting_has_a_working_environment_twin() -> None:
    """The default, written as text, is taken from the environment and changes nothing."""

    def as_text(value: object) -> str:
        return ",".join(value) if isinstance(value, tuple) else str(getattr(value, "value", value))

    defaults = load_config(environment={})
    environment = {env_name(key): as_text(defaults.value(key)) for key in known_fields()}
    loaded = load_config(environment=environment)
    assert loaded.config == defaults.config
    assert all(loaded.origins[key] == f"environment {env_name(key)}" for key in known_fields())


@pytest.mark.parametrize("text", ["one,two", " one , two,", '["one", "two"]'])
def test_lists_in_text(text: str) -> None:
    assert load_config(environment={"MOONPOOL_GATEWAY__API_KEYS": text}).config.gateway.api_keys == ("one", "two")


def test_a_size_may_be_a_number_in_yaml(tmp_path: Path) -> None:
    assert load_config(file=written(tmp_path, "pool:\n  dram: 1048576\n"), environment={}).config.pool.dram == "1048576"


def test_an_empty_file_and_an_empty_section_set_nothing(tmp_path: Path) -> None:
    assert load_config(file=written(tmp_path, ""), environment={}).config == ClusterConfig()
    assert load_config(file=written(tmp_path, "model:\n"), environment={}).config == ClusterConfig()


def test_unknown_name_in_the_file_names_the_nearest_and_the_line(tmp_path: Path) -> None:
    file = written(tmp_path, "gateway:\n  prot: 1\nmodle:\n  dtype: float32\n")
    assert problems(file=file) == [
        f"file {file} line 2: no setting 'gateway.prot'; the nearest is 'gateway.port'",
        f"file {file} line 3: no setting 'modle'; the nearest is 'model.dtype'",
    ]


def test_unknown_name_in_the_environment_or_a_flag_names_the_nearest() -> None:
    found = problems(environment={"MOONPOOL_GATEWAY_PORT": "1"}, sets=["prefil.workers=2", "nonsense"])
    assert found == [
        "environment MOONPOOL_GATEWAY_PORT: no such setting; the nearest is MOONPOOL_GATEWAY__PORT",
        "flag --set: no setting 'prefil.workers'; the nearest is 'prefill.workers'",
        "flag --set: expected section.field=value",
    ]


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("port", "gateway.port"), ("block_token", "model.block_tokens"), ("POOL.DRAM", "pool.dram"), ("lease", "pool.lease_s")],
)
def test_nearest_key(given: str, nearest: str) -> None:
    assert nearest_key(given) == nearest


def test_nearest_variable_may_be_one_that_is_no_setting() -> None:
    assert nearest_env("MOONPOOL_CONFG") == "MOONPOOL_CONFIG"


def test_variables_of_others_are_left_alone() -> None:
    assert load_config(environment={"MOON": "1", "HOME": "/", "MOONPOOL_URL": "http://x"}).config == ClusterConfig()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n", "expected sections"),
        ("gateway: 5\n", "line 1: gateway: expected fields"),
        ("gateway:\n  port: 1\n  port: 2\n", "line 3: gateway.port is set twice"),
        ("gateway:\n  port: [1\n", "not YAML (line"),
        ("? [a]\n: 1\n", "(not a name)"),
        ("gateway:\n  port: !!python/object:os.system 1\n", "not YAML (line 2"),
    ],
)
def test_malformed_file(tmp_path: Path, text: str, said: str) -> None:
    file = written(tmp_path, text)
    [problem] = problems(file=file)
    assert problem.startswith(f"file {file}")
    assert said in problem


def test_missing_and_oversized_files(tmp_path: Path) -> None:
    assert problems(file=tmp_path / "none.yaml") == [f"file {tmp_path / 'none.yaml'}: No such file or directory"]
    file = written(tmp_path, "#" * (1024 * 1024 + 1))
    assert "longer than" in problems(file=file)[0]


def test_a_wrong_value_names_key_and_origin_but_never_the_value() -> None:
    found = problems(environment={"MOONPOOL_GATEWAY__PORT": "hunter2", "MOONPOOL_MODEL__DTYPE": "int3"})
    assert len(found) == 2
    assert found[0].startswith("model.dtype: Input should be 'auto', 'float32'")
    assert found[0].endswith("[environment MOONPOOL_MODEL__DTYPE]")
    assert found[1].startswith("gateway.port: Input should be a valid integer")
    assert "hunter2" not in "".join(found)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["model.block_tokens=48", "model.chunk_tokens=96"], "model.block_tokens: 48 is not a power of two"),
        (["model.chunk_tokens=100"], "model.chunk_tokens: 100 is not a multiple of model.block_tokens (64)"),
        (["scheduler.suspect_after_s=3.0"], "under scheduler.dead_after_s (3)"),
        (["scheduler.heartbeat_s=2"], "over scheduler.heartbeat_s (2)"),
        (["pool.client_dead_s=11"], "over pool.lease_s (10)"),
        (["pool.nodes=2"], "pool.nodes: 2 is more than"),
        (["scheduler.classes=fast=ttft soon"], "scheduler.classes: fast: ttft 'soon' is not a time above 0"),
        (["scheduler.classes=a=ttft 1s,a=ttft 2s"], "scheduler.classes: 'a' is there twice"),
        (["scheduler.classes="], "scheduler.classes: 1 to 64 classes are needed, not 0"),
        (["pool.dram=lots"], "pool.dram: size 'lots': expected a number"),
        (["decode.device_cache=1GiBs"], "decode.device_cache: size"),
        (["gateway.request_timeout_s=inf"], "gateway.request_timeout_s: inf is not a finite number"),
    ],
)
def test_values_that_do_not_fit_each_other(sets: list[str], said: str) -> None:
    [problem] = problems(sets=sets)
    assert said in problem
    assert f"[flag --set {sets[0].partition('=')[0]}" in problem


def test_all_problems_are_told_at_once() -> None:
    assert len(problems(sets=["model.chunk_tokens=100", "pool.nodes=2", "pool.dram=x"])) == 3


def test_flag_and_set_that_contradict_each_other() -> None:
    flag = Setting("gateway.port", 1, "flag --port")
    assert "say different things" in problems(flags=[flag], sets=["gateway.port=2"])[0]
    assert load_config(flags=[flag], sets=["gateway.port=1"], environment={}).config.gateway.port == 1


def test_models_are_frozen_closed_and_described() -> None:
    config = ClusterConfig()
    with pytest.raises(ValidationError):
        config.cluster = ClusterSettings()  # type: ignore[misc]
    with pytest.raises(ValidationError):
        ClusterConfig.model_validate({"cluster": {"adress": "x"}})
    for key, field in known_fields().items():
        assert field.description, f"{key} has no description"
        assert field.description.endswith("."), f"{key}: the description is not a sentence"
    assert set(known_fields()) >= SIZES | SECRETS


def test_every_cluster_setting_is_read_by_somebody() -> None:
    """A setting that nothing reads is a promise that nothing keeps."""
    launch = Path(__file__).parents[2].joinpath("cluster", "launch.py").read_text()
    for name in ClusterSettings.model_fields:
        assert f".{name}" in launch, f"cluster.{name} is not used"


def test_every_variable_that_the_code_reads_is_known() -> None:
    """Else setting it would be refused as a mistyped setting."""
    root = Path(__file__).parents[2]
    packages = ("cluster", "engine", "kv_pool", "prefill_worker", "decode_worker", "scheduler")
    sources = [path for package in packages for path in (root / package).rglob("*.py")]
    assert len(sources) > 50
    read = {name for path in sources for name in re.findall(r"\"(MOONPOOL_[A-Z0-9_]+)\"", path.read_text())}
    assert read - {"MOONPOOL_"} == set(ENV_OTHERS)
