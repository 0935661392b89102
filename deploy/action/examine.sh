#!/usr/bin/env bash
# Runs $VERB with $OPTIONS on each line of $CHECKPOINTS; names are never taken for options or for shell's words.
set -euo pipefail
case "$VERB" in
  check | doctor) ;;
  *) echo "verb must be check or doctor, not: $VERB" >&2; exit 2 ;;
esac
mapfile -t checkpoints < <(grep -v '^[[:space:]]*$' <<<"$CHECKPOINTS")
read -r -a options <<<"${OPTIONS:-}"
exec statekit "$VERB" "${options[@]}" -- "${checkpoints[@]}"
