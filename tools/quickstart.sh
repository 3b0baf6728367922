#!/usr/bin/env bash
# From a bare machine with Python >= 3.11: install, train the default model, sample from it.
# Arguments are added to the training command: bash tools/quickstart.sh steps=50
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/venv.sh

python=$(newest_python 11)
fill_venv .venv "$python" ""
.venv/bin/python -m maxlite.train configs/base.yml "$@"
printf '\nA sample of what it writes after "def ":\n\n'
.venv/bin/python -m maxlite.generate configs/base.yml 'prompt=def '
printf '\nThe curves are in runs/base/curves.png, the numbers in runs/base/metrics.jsonl.\n'
