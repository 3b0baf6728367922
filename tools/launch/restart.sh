#!/usr/bin/env bash
# Runs a command, and again after a failure, up to RESTARTS times.
#
#   tools/launch/restart.sh RESTARTS python -m maxlite.train configs/base.yml run_name=big ...
#
# Not after success, a wrong command line (2), a program that cannot be started (126, 127), or an
# interrupt or SIGTERM (130, 143), which reach it as SIGTERM. The run resumes from its latest checkpoint.
set -uo pipefail
readonly RESTART_SECONDS=${RESTART_SECONDS:-10}
readonly restarts=$1
shift
child=''
is_stopping=false

stop() {
  local running
  running=$(jobs -p) # also a command that was started, but not yet assigned to `child`
  if [[ -z "$running" ]]; then
    exit 143 # between two attempts
  fi
  is_stopping=true
  kill -TERM "$running" 2>/dev/null
}
trap stop TERM INT

for ((attempt = 0; ; attempt++)); do
  "$@" &
  child=$!
  wait "$child"
  code=$?
  while kill -0 "$child" 2>/dev/null; do # a signal ended `wait`, but not yet the command
    wait "$child"
    code=$?
  done
  child=''
  case $code in
    0 | 2 | 126 | 127 | 130 | 143) exit "$code" ;;
  esac
  if $is_stopping || ((attempt >= restarts)); then
    exit "$code"
  fi
  echo "ended with code $code; restart $((attempt + 1)) of $restarts" >&2
  sleep "$RESTART_SECONDS"
done
