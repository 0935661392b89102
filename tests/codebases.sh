#!/usr/bin/env bash
# Makes the environments of the originals below build/codebases, and runs the tests in which they go on from our files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
place=$PWD/build/codebases bin=$PWD/.venv/bin
mkdir -p "$place"
[ -d "$place/megatron" ] || "$bin/pip" install --quiet --no-deps --target "$place/megatron" megatron-core==0.16.1
[ -d "$place/deepspeed" ] || "$bin/pip" install --quiet --no-deps --target "$place/deepspeed" \
  deepspeed==0.19.8 einops hjson msgpack ninja py-cpuinfo
# MaxText has its own JAX, and needs Python 3.12.
if [ ! -x "$place/maxtext/bin/python" ] && command -v "${PYTHON312:-python3.12}" >/dev/null; then
  "${PYTHON312:-python3.12}" -m venv "$place/maxtext"
  "$place/maxtext/bin/pip" install --quiet maxtext==0.2.5 || { rm -rf "$place/maxtext"; echo "MaxText couldn't be installed: its tests are skipped."; }
fi
[ -x "$place/maxtext/bin/python" ] && export STATEKIT_MAXTEXT=$place/maxtext/bin/python
export STATEKIT_MEGATRON=$place/megatron STATEKIT_DEEPSPEED=$place/deepspeed
exec "$bin/pytest" -q -m slow tests/test_codebases.py tests/test_decoders_page.py "$@"
