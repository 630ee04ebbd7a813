#!/usr/bin/env bash
# Builds what is released into OUT, and tries it: source archive, wheel, SBOM, root of the image, checksums.
# Nothing is published. BASE: root of vLLM's image, as .ci/rootfs.py takes it.
#   .ci/release.sh VENV OUT
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1/bin/python out=$2

say() { printf '== %s\n' "$*"; }
fail() { echo "release: $*" >&2; exit 1; }

version=$("$python" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
[ -z "$(git status --porcelain)" ] || fail "there are changes that are not committed: commit them first."
grep -q "^## \[$version\] - " CHANGELOG.md || fail "CHANGELOG.md has no section [$version], the version in pyproject.toml."
tag=$(git describe --tags --exact-match 2>/dev/null || true)
[ -z "$tag" ] || [ "$tag" = "v$version" ] || fail "the commit has the tag $tag, but pyproject.toml has version $version."

grep -q "^{\"version\": \"$version\"" benchmarks/history.jsonl || fail "benchmarks/history.jsonl has no line of $version: manthan bench history --add"

rm -rf "$out"
mkdir -p "$out"
say "installing build and cyclonedx-bom"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install -qq --disable-pip-version-check build cyclonedx-bom

say "building the source archive, and the wheel from it"
git archive --prefix=source/ HEAD | tar x -C "$work"
"$work/tools/bin/python" -m build --outdir "$out" "$work/source" >"$work/build.log" || { tail -20 "$work/build.log" >&2; fail "the build failed."; }

say "installing the wheel into an empty environment"
"$python" -m venv "$work/bare"
"$work/bare/bin/python" -m pip install -qq --disable-pip-version-check "$out"/manthan_kv-*.whl
(
    cd "$work"  # not where the sources are
    "$work/bare/bin/manthan" --help >/dev/null
    [ "$("$work/bare/bin/manthan" version | awk '{print $NF}')" = "$version" ] || fail "the wheel says another version."
    "$work/bare/bin/python" -c 'import manthan.codec, manthan.manager, manthan.policies'
    { "$work/bare/bin/manthan" doctor || true; } | grep -q "vLLM.*not installed" || fail "manthan doctor does not say that vLLM is missing."
)

say "listing what is in that environment (CycloneDX)"
"$work/tools/bin/python" -m cyclonedx_py environment --pyproject pyproject.toml --output-reproducible --of JSON \
    -o "$out/manthan_kv.cdx.json" "$work/bare/bin/python"
say "running the steps of deploy/Dockerfile"
[ "$(id -u)" = 0 ] || sudo=sudo
${sudo:-} "$python" .ci/rootfs.py "$out" ${BASE:+--base "$BASE"}
(cd "$out" && sha256sum ./*.tar.gz ./*.whl ./*.json > SHA256SUMS)
say "$out has $(cd "$out" && echo *)"
