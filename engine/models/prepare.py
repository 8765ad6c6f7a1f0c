"""``python -m engine.models.prepare [source] [--dtype ...] [--verify]``: fetch and convert a model ahead of time."""

from __future__ import annotations

import argparse
import sys

from engine.models.cache_folder import MANIFEST, verify
from engine.models.source import ModelNotAvailableError, resolve_model
from engine.settings import ModelSettings


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.models.prepare", description="Fetch and convert a model ahead of time."
    )
    parser.add_argument("source", nargs="?", default="smollm2", help="smollm2, a Hugging Face id, a folder, or a .gguf file")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--verify", action="store_true", help="hash every prepared file again")
    options = parser.parse_args()
    try:
        settings = ModelSettings(source=options.source, dtype=options.dtype)
        files = resolve_model(settings, progress=lambda text: print(text, flush=True))
    except ModelNotAvailableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.verify and (files.path / MANIFEST).is_file():
        bad = verify(files.path)
        if bad:
            print(f"error: {files.path}: damaged files {', '.join(bad)}; delete the folder and run this again", file=sys.stderr)
            return 1
    print(f"model: {files.name} ({files.dtype}) in {files.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
