#!/usr/bin/env bash
# Builds Manthan's wheel into WHEEL_DIR, from scratch: setuptools would pack stale files from an earlier build/ too.
# What others keep there, such as build/models, stays.
#   .ci/build_wheel.sh VENV WHEEL_DIR
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf build/lib build/bdist.* "$2"
exec "$1/bin/python" -m pip wheel -qq --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$2" .
