#!/usr/bin/env bash
# Run lint, the checks of the source, type checks and the tests, except slow ones (`-m slow`) and those
# against transformers (`-m hf`, see .ci/run).
# Needs only Python >= 3.11; takes the newest up to 3.14. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/venv.sh
source tools/stages.sh

python=$(newest_python)
stage "install" fill_venv .venv "$python" "[test]"
stage "ruff check" .venv/bin/ruff check .
stage "ruff format" .venv/bin/ruff format --check .
stage "tools/check.py" .venv/bin/python tools/check.py
types=$(mktemp)
stage "mypy, beside the tests" .venv/bin/mypy > "$types" 2>&1 &  # it uses one processor
mypy=$!
status=0
stage "tests" .venv/bin/pytest -n "$(getconf _NPROCESSORS_ONLN)" -m "not slow and not hf" "$@" || status=$?
wait "$mypy" || status=$?
cat "$types"
exit "$status"
