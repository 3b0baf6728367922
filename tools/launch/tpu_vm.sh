#!/usr/bin/env bash
# A run on all workers of a Cloud TPU VM.
#
#   tools/launch/tpu_vm.sh [--dry-run] NAME ZONE configs/base.yml base_output_directory=/shared/runs ...
#
# Copies the last commit of this checkout to every worker, installs it there with its `tpu` extra, and
# starts the same command on all; what they write comes here. They find each other by themselves, and
# need one folder that all of them see for base_output_directory (Filestore, or a bucket mounted by
# gcsfuse). After a failure the same command goes on from the newest checkpoint. Needs gcloud, logged in.
# --dry-run prints its commands instead.
set -euo pipefail

dry_run=false
if [[ "${1:-}" == --dry-run ]]; then
  dry_run=true
  shift
fi
if (($# < 3)); then
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
  exit 2
fi
readonly name=$1 zone=$2
shift 2
cd "$(dirname "$0")/../.."

gcloud_tpu() {
  local command=(gcloud compute tpus tpu-vm "$@" --zone="$zone" --worker=all)
  if $dry_run; then
    printf '%q ' "${command[@]}"
    echo
  else
    "${command[@]}"
  fi
}

archive=$(mktemp -d)/maxlite.tar.gz
trap 'rm -rf "$(dirname "$archive")"' EXIT
git archive --output="$archive" HEAD
gcloud_tpu scp "$archive" "$name:"
gcloud_tpu ssh "$name" --command="rm -rf maxlite && mkdir maxlite && tar -xzf maxlite.tar.gz -C maxlite \
&& cd maxlite && python3 -m venv .venv && .venv/bin/pip install --quiet --editable '.[tpu]'"
printf -v words ' %q' "$@"
gcloud_tpu ssh "$name" --command="cd maxlite && exec .venv/bin/python -m maxlite.train$words"
