"""``python -m engine.models.prepare [source] [--dtype ...] [--verify]``: fetch and convert a model ahead of time."""

from __future__ import annotations

import argparse
import sys

from engine.models.cache_folder import MANIFEST
from engine.models.digests import changed, forget
from engine.models.source import ModelFiles, ModelNotAvailableError, resolve_model
from engine.settings import ModelSettings


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.models.prepare", description="Fetch and convert a model ahead of time."
    )
    parser.add_argument("source", nargs="?", default="smollm2", help="smollm2, a Hugging Face id, a folder, or a .gguf file")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--verify", action="store_true", help="hash every file again; a damaged prepared model is made anew")
    options = parser.parse_args(arguments)
    settings = ModelSettings(source=options.source, dtype=options.dtype)
    try:
        files = resolve_model(settings, progress=_say)
        if options.verify:
            files = _verified(files, settings)
    except ModelNotAvailableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"model: {files.name} ({files.dtype}) in {files.path}")
    return 0


def _verified(files: ModelFiles, settings: ModelSettings) -> ModelFiles:
    damaged = changed(files.path)
    if not damaged:
        return files
    forget(files.path)
    if not (files.path / MANIFEST).is_file():
        raise ModelNotAvailableError(f"{files.path}: {', '.join(damaged)} changed without being written; fetch the model again")
    _say(f"model: {', '.join(damaged)} damaged, making it anew")
    return resolve_model(settings, progress=_say)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
