"""From what the user names to files: every way to get it wrong says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.models import smollm2
from engine.models.cache_folder import MANIFEST
from engine.models.files import ModelFiles
from engine.models.source import ModelNotAvailableError, resolve_model
from engine.settings import ModelSettings
from tests.cluster.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOONPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


def resolve(source: Path | str, dtype: str = "float32") -> ModelFiles:
    return resolve_model(ModelSettings(source=str(source), dtype=dtype))


def test_a_folder_in_the_right_dtype_is_used_where_it_is(tiny: Path, cache: Path):
    files = resolve(tiny)
    assert (files.path, files.dtype) == (tiny, "float32")
    assert not (cache / "models").exists()


def test_another_dtype_is_converted_once_and_found_again(tiny: Path, cache: Path):
    first = resolve(tiny, "bfloat16")
    assert first.path.is_relative_to(cache)
    assert json.loads((first.path / "config.json").read_text())["dtype"] == "bfloat16"
    made = (first.path / MANIFEST).stat().st_mtime_ns
    assert resolve(tiny, "bfloat16") == first
    assert (first.path / MANIFEST).stat().st_mtime_ns == made


def test_the_fingerprint_follows_the_bytes_not_the_place(tiny: Path, tmp_path: Path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(tiny, copy)
    assert resolve(copy).fingerprint == resolve(tiny).fingerprint
    assert resolve(tiny, "bfloat16").fingerprint != resolve(tiny).fingerprint
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert resolve(copy).fingerprint != resolve(tiny).fingerprint


def test_the_same_bytes_prepared_or_used_in_place_are_one_model(tiny: Path):
    prepared = resolve(tiny, "bfloat16")
    assert resolve(prepared.path, "bfloat16").fingerprint == prepared.fingerprint


def test_a_changed_folder_is_converted_again_in_the_same_place(tiny: Path, tmp_path: Path):
    copy = tmp_path / "mine"
    shutil.copytree(tiny, copy)
    first = resolve(copy, "bfloat16")
    (copy / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    again = resolve(copy, "bfloat16")
    assert again == first  # the weights are what they were
    assert (again.path / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"


def test_the_weights_say_their_dtype_whatever_the_configuration_says(tiny: Path, tmp_path: Path, cache: Path):
    copy = tmp_path / "liar"
    shutil.copytree(tiny, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert resolve(copy).path == copy
    assert resolve(copy, "bfloat16").path.is_relative_to(cache)


def test_a_served_name_is_only_a_name(tiny: Path):
    files = resolve_model(ModelSettings(source=str(tiny), dtype="float32", served_name="mine"))
    assert (files.name, files.fingerprint) == ("mine", resolve(tiny).fingerprint)


@pytest.mark.parametrize(
    ("gone", "named"), [("config.json", "config.json"), ("model.safetensors", "safetensors"), ("tokenizer.json", "tokenizer")]
)
def test_what_a_folder_lacks_is_named(tiny: Path, tmp_path: Path, gone: str, named: str):
    copy = tmp_path / "broken"
    shutil.copytree(tiny, copy)
    (copy / gone).unlink()
    with pytest.raises(ModelNotAvailableError, match=named):
        resolve(copy)


def test_pickled_weights_are_never_read(tiny: Path, tmp_path: Path):
    copy = tmp_path / "pickled"
    shutil.copytree(tiny, copy)
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelNotAvailableError, match="pickled"):
        resolve(copy)


def test_shards_are_all_wanted(tiny: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    copy = tmp_path / "sharded"
    shutil.copytree(tiny, copy)
    (copy / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(tiny).save_pretrained(copy, max_shard_size="200KB")
    shards = sorted(copy.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert resolve(copy).path == copy
    shards[1].unlink()
    with pytest.raises(ModelNotAvailableError, match=f"it has no {shards[1].name}"):
        resolve(copy)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "damage", [lambda data: data[:-5000], lambda data: b"x" * 100, lambda data: b"", lambda data: LFS_POINTER]
)
def test_weights_that_are_not_whole_are_refused_before_anything_starts(tiny: Path, tmp_path: Path, damage, dtype: str):
    copy = tmp_path / "cut"
    shutil.copytree(tiny, copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(ModelNotAvailableError, match="not a whole safetensors file"):
        resolve(copy, dtype)


def test_weights_that_are_missing_are_not_made_up(tiny: Path, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    copy = tmp_path / "holes"
    shutil.copytree(tiny, copy)
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelNotAvailableError, match=r"lacks 1 weights of a LlamaForCausalLM, such as model\.layers\.1\.mlp\.up_proj"
    ):
        resolve(copy, "bfloat16")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["[]", "{", ""])
def test_files_that_are_not_json_objects_are_named(tiny: Path, tmp_path: Path, name: str, content: str):
    copy = tmp_path / "odd"
    shutil.copytree(tiny, copy)
    (copy / name).write_text(content)
    with pytest.raises(ModelNotAvailableError, match=name):
        resolve(copy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_code_in_a_model_folder_is_neither_run_nor_asked_about(tiny: Path, tmp_path: Path, dtype: str, monkeypatch):
    copy = tmp_path / "programs"
    shutil.copytree(tiny, copy)
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "special", "auto_map": {"AutoConfig": "special.C", "AutoModelForCausalLM": "special.M"}}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "special.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(ModelNotAvailableError, match=r"'special'.*never run"):
        resolve(copy, dtype)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("no-such-folder", "no such folder"),
        ("missing.gguf", "no such file"),
        ("somebody/some-model", "download somebody/some-model elsewhere"),
        ("../escape/../x y", "not a Hugging Face id"),
    ],
)
def test_a_model_that_is_not_there_says_what_to_do(source: str, advice: str):
    with pytest.raises(ModelNotAvailableError, match=advice):
        resolve(source)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model", b"GGUF\x03\0\0\0" + b"\0" * 100])
def test_a_file_that_is_no_gguf_says_so(tmp_path: Path, content: bytes):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelNotAvailableError, match=r"x\.gguf could not be read"):
        resolve(tmp_path / "x.gguf")
    assert not [p for p in (tmp_path / "cache" / "models").iterdir() if p.is_dir()]  # nothing half-made is left


@pytest.mark.parametrize("content", [b"no zip", None])
def test_a_wrong_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None):
    wheel = tmp_path / "llm.whl"
    if content is not None:
        wheel.write_bytes(content)
    monkeypatch.setenv(smollm2.WHEEL_VARIABLE, str(wheel))
    with pytest.raises(ModelNotAvailableError, match=r"llm\.whl|MOONPOOL_SMOLLM2_WHEEL"):
        resolve("smollm2")


def test_a_wheel_with_another_model_inside_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import zipfile

    wheel = tmp_path / "llm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.MEMBER, b"something else")
    monkeypatch.setenv(smollm2.WHEEL_VARIABLE, str(wheel))
    with pytest.raises(ModelNotAvailableError, match="checksum"):
        resolve("smollm2")
