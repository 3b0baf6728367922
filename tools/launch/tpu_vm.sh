#!/usr/bin/env bash
# Runs maxlite.train on all workers of a Cloud TPU VM.
#
#   tools/launch/tpu_vm.sh [--dry-run] NAME ZONE configs/base.yml base_output_directory=/shared/runs ...
#
# Copies the last commit of this checkout to every worker, installs it with its `tpu` extra, and runs
# the same command on all workers, with their output here. The workers find each other, and prove with
# a secret, which is copied as a file that only its owner can read, that they belong to the run. They need a
# shared folder for base_output_directory (Filestore, or a bucket mounted by gcsfuse). After a failure,
# all workers restart the command, up to RESTARTS times (environment variable; 20), and resume from the
# latest checkpoint. Requires gcloud, logged in.
# --dry-run prints the commands instead.
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
readonly name=$1 zone=$2 restarts=${RESTARTS:-20}
shift 2
cd "$(dirname "$0")/../.."
if [[ -n "$(git status --porcelain)" ]]; then
  echo "warning: uncommitted changes are not copied to the workers; commit them" >&2
fi
for argument in "$@"; do
  if [[ "$argument" == *.y*ml && "$argument" != *=* ]] && ! git cat-file -e "HEAD:$argument" 2>/dev/null; then
    echo "warning: $argument is not in the last commit, which is what workers get; commit it, and write its path from the top of the checkout" >&2
  fi
done

gcloud_tpu() {
  local command=(gcloud compute tpus tpu-vm "$@" --zone="$zone" --worker=all)
  if $dry_run; then
    printf '%q ' "${command[@]}"
    echo
  else
    "${command[@]}"
  fi
}

umask 077
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git archive --output="$folder/maxlite.tar.gz" HEAD
# Without it, no process can join this run. Command lines are visible to all users of a machine.
openssl rand -hex 16 >"$folder/maxlite.token"
gcloud_tpu scp "$folder/maxlite.tar.gz" "$folder/maxlite.token" "$name:"
gcloud_tpu ssh "$name" --command="rm -rf maxlite && mkdir maxlite && tar -xzf maxlite.tar.gz -C maxlite \
&& cd maxlite && python3 -m venv .venv && .venv/bin/pip install --quiet --constraint constraints.txt --editable '.[tpu]'"
printf -v words ' %q' "$@"
gcloud_tpu ssh "$name" --command="cd maxlite && MAXLITE_COORDINATOR_TOKEN=\$(cat ../maxlite.token) && export MAXLITE_COORDINATOR_TOKEN \
&& rm ../maxlite.token && exec tools/launch/restart.sh $restarts .venv/bin/python -m maxlite.train$words"
