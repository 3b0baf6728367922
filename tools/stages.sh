# Sourced by test.sh and .ci/run: measures the stages of a script and of the scripts that it calls.

if [ -z "${STAGES:-}" ]; then
  STAGES=$(mktemp)
  export STAGES
  trap 'print_stages' EXIT
fi

# Runs the command after the name $1.
stage() {
  local name=$1 start=$SECONDS status=0
  shift
  "$@" || status=$?
  printf '%6d s  %s\n' $((SECONDS - start)) "$name" >> "$STAGES"
  return "$status"
}

# Prints the seconds of each stage, in the order in which they ended.
print_stages() {
  cat "$STAGES"
  rm "$STAGES"
}
