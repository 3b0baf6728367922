#!/usr/bin/env bash
# Install maxlite, train the default model for 200 steps and sample from it. Needs only
# Python >= 3.11; takes the newest up to 3.14.
# Arguments go to the training command: bash tools/quickstart.sh steps=300
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/venv.sh

python=$(newest_python)
fill_venv .venv "$python" ""
.venv/bin/python -m maxlite.train configs/base.yml steps=200 "$@"
printf '\nA sample with the prompt "def ":\n\n'
.venv/bin/python -m maxlite.generate configs/base.yml 'prompt=def '
printf '\nCurves: runs/base/curves.png. Metrics: runs/base/metrics.jsonl.\n'
