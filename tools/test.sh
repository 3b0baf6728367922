#!/usr/bin/env bash
# Run lint, type checks and all tests. Needs only Python >= 3.11. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/venv.sh

python=$(newest_python 11)
fill_venv .venv "$python" "[test]"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/pytest -n "$(getconf _NPROCESSORS_ONLN)" "$@"
