#!/usr/bin/env bash
# Creates the virtual environment that `make` works in: CPU torch, vLLM's CPU build and the developer tools.
#   .ci/setup_venv.sh VENV WHEEL_DIR      PYTHON=/path/to/python chooses the interpreter
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 wheels=$2
python=$venv/bin/python
torch=2.13.0
cpu_index=https://download.pytorch.org/whl/cpu

say() { printf '== %s\n' "$*"; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Manthan needs Python 3.11 or newer; none was found (tried ${PYTHON:-python3.11, python3.12, python3.13, python3})." >&2
    return 1
}

# Warnings are left out (a local index that does not exist is none of the reader's business), errors are not.
# One retry: where an extra index cannot be reached, pip goes on with the others.
pip_install() {
    local status=0 teller
    tell_progress & teller=$!
    "$python" -m pip install -qq --disable-pip-version-check --retries 1 "$@" || status=$?
    kill "$teller"
    wait "$teller" 2>/dev/null || true
    return "$status"
}

tell_progress() {
    local began=$SECONDS
    while sleep 20 >/dev/null 2>&1; do
        printf '   %d s, %s has %s\n' $((SECONDS - began)) "$venv" "$(du -sh "$venv" | cut -f1)"
    done
}
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

if [ ! -x "$python" ]; then
    found=$(find_python)
    say "creating $venv with $("$found" --version)"
    "$found" -m venv "$venv"
fi

say "installing torch $torch (CPU)"
if ! pip_install --extra-index-url "$cpu_index" "torch==$torch+cpu"; then
    # The plain torch of Linux on x86 is the CUDA build: 4 GB of libraries that vLLM's CPU build has no use for.
    if [ "$(uname -sm)" = "Linux x86_64" ]; then
        echo "torch $torch+cpu could not be installed from pip's indexes nor from $cpu_index:" \
            "name an index that has it in PIP_EXTRA_INDEX_URL, or a folder in PIP_FIND_LINKS." >&2
        exit 1
    fi
    # Platforms without +cpu builds, such as macOS, have plain ones that are CPU builds already.
    pip_install "torch==$torch"
fi

say "installing vLLM (CPU) and the developer tools: a few minutes the first time"
pip_install "setuptools>=77" wheel
.ci/build_wheel.sh "$venv" "$wheels"
pip_install "$(echo "$wheels"/manthan_kv-*.whl)[cpu,dev]"

# Packages built for CUDA torch cannot be imported with CPU torch, and vLLM and Transformers do without them.
if ! "$python" -c 'import torchvision' 2>/dev/null; then
    say "removing torchvision, torchaudio and torchcodec: they are not built for this torch"
    "$python" -m pip uninstall -qq -y torchvision torchaudio torchcodec
fi

"$python" .ci/name_vllm.py
say "$venv is ready"
