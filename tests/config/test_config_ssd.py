"""The SSD tier's settings: what cannot work together is said by name before anything starts."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from cluster.config.schema import ClusterConfig
from kv_pool.settings import PoolSettings
from kv_pool.sizes import parse_duration


def test_the_defaults_have_no_ssd_and_are_sound():
    config = ClusterConfig()
    assert config.ssd.directory == ""
    assert config.pool.retention_classes == {"chat": 86_400.0, "agent": 14_400.0, "coding": 1_209_600.0, "batch": 3_600.0}


@pytest.mark.parametrize(
    ("ssd", "pool", "named"),
    [
        ({"capacity": "much"}, {}, "ssd.capacity"),
        ({"segment": "512KiB"}, {}, "ssd.segment"),
        ({"capacity": "1GiB", "segment": "256MiB"}, {}, "ssd.capacity"),
        ({"batch": "1GiB"}, {}, "ssd.batch"),
        ({"dwpd": -1}, {}, "dwpd"),
        ({"dwpd": float("inf")}, {}, "ssd.dwpd"),
        ({"free_target": 1.0}, {}, "free_target"),
        ({"threads": 0}, {}, "threads"),
        ({"folder": "/x"}, {}, "folder"),
        ({"directory": "/x"}, {"nodes": 2}, "ssd.directory"),
        ({}, {"retention": ()}, "retention"),
        ({}, {"retention": ("chat=24h", "chat=1h")}, "retention"),
        ({}, {"retention": ("chat=soon",)}, "retention"),
        ({}, {"retention": ("chat",)}, "retention"),
        ({}, {"retention": ("not a name=1h",)}, "retention"),
        ({}, {"eviction": "random"}, "eviction"),
    ],
)
def test_what_cannot_be_is_named(ssd: dict[str, object], pool: dict[str, object], named: str):
    workers = {"prefill": {"workers": 2}, "decode": {"workers": 2}}
    with pytest.raises(ValidationError, match=named):
        ClusterConfig.model_validate({"ssd": ssd, "pool": pool, **workers})


def test_several_nodes_have_a_directory_each():
    workers = {"prefill": {"workers": 2}, "decode": {"workers": 2}}
    config = ClusterConfig.model_validate({"ssd": {"directory": "/data/{node}"}, "pool": {"nodes": 2}, **workers})
    assert config.ssd.directory == "/data/{node}"


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30.0), ("1.5m", 90.0), (" 4 h ", 14_400.0), ("14d", 1_209_600.0)])
def test_durations(text: str, seconds: float):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "h", "-1h", "0s", "1w", "1h30m"])
def test_what_is_no_duration(text: str):
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


def test_a_classes_place_is_its_number():
    assert list(PoolSettings(retention=("b=1h", "a=2h")).retention_classes) == ["b", "a"]
