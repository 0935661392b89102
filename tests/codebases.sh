#!/usr/bin/env bash
# Runs the tests in which the originals go on from our files. Their environments are made below build/codebases, but for
# those that are named already: STATEKIT_MEGATRON and STATEKIT_DEEPSPEED name folders of packages, STATEKIT_MAXTEXT a
# Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
place=$PWD/build/codebases bin=$PWD/.venv/bin
mkdir -p "$place"
packages() { # NAME REQUIREMENT...: prints the folder that has them
  [ -d "$place/$1" ] || "$bin/pip" install --quiet --no-deps --target "$place/$1" "${@:2}" >&2
  echo "$place/$1"
}
if [ -z "${STATEKIT_MEGATRON:-}" ]; then
  STATEKIT_MEGATRON=$(packages megatron megatron-core==0.16.1)
fi
if [ -z "${STATEKIT_DEEPSPEED:-}" ]; then
  STATEKIT_DEEPSPEED=$(packages deepspeed deepspeed==0.19.8 einops hjson msgpack ninja py-cpuinfo)
fi
# MaxText has its own JAX, and needs Python 3.12. Its package asks for nothing by itself: tests/maxtext.txt has what it
# imports on a CPU, each at a version, as pip looks for versions for many minutes.
if [ -z "${STATEKIT_MAXTEXT:-}" ]; then
  python=${PYTHON312:-python3.12} maxtext=$place/maxtext
  if [ ! -x "$maxtext/bin/python" ] && command -v "$python" >/dev/null; then
    "$python" -m venv "$maxtext"
    "$maxtext/bin/pip" install --quiet --no-deps -r tests/maxtext.txt || { rm -rf "$maxtext"; echo "MaxText couldn't be installed: its tests are skipped."; }
  fi
  [ -x "$maxtext/bin/python" ] && STATEKIT_MAXTEXT=$maxtext/bin/python
fi
export STATEKIT_MEGATRON STATEKIT_DEEPSPEED
[ -z "${STATEKIT_MAXTEXT:-}" ] || export STATEKIT_MAXTEXT
exec "$bin/pytest" -q -m slow tests/test_codebases.py tests/test_decoders_page.py "$@"
