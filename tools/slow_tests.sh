#!/usr/bin/env bash
# Run what tools/test.sh leaves out: the slow tests on the newest JAX, then all tests of ensembles and
# phases on the oldest that is supported, on which CI runs only the smoke tests, then the planted bugs.
# Arguments, such as paths of tests, go to pytest and replace the other parts.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/venv.sh

python=$(newest_python)
fill_venv .venv "$python" "[test]"
parallel=(-n "$(getconf _NPROCESSORS_ONLN)")
status=0
.venv/bin/pytest "${parallel[@]}" -m "slow and not hf" "$@" || status=$?
if [ $# = 0 ] && oldest=$(find_python 11); then
  fill_venv .venv-3.11 "$oldest" "[test]"
  .venv-3.11/bin/pytest "${parallel[@]}" -m "not hf" tests/ensemble tests/phases || status=$?
fi
if [ $# = 0 ]; then
  .venv/bin/python tools/inspect/mutants.py || status=$?
fi
exit "$status"
