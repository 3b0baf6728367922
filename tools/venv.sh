# Sourced by test.sh, quickstart.sh and .ci/run: finds Python and installs into a virtual environment.

unset PYTHONDONTWRITEBYTECODE  # each process would compile all modules again

# Prints the newest working Python >= 3.$1 ($PYTHON, if set, is the only candidate).
newest_python() {
  local oldest=$1 candidate
  local candidates=(python3.{20..11} python3)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}" "${@:2}"; do
    if "$candidate" -c "import sys; sys.exit(sys.version_info < (3, $oldest))" 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "no Python >= 3.$oldest; install one, or name it: PYTHON=/path/to/python3 $0" >&2
  return 1
}

# Gives uv, which does not read pip's settings, the package indexes that pip of Python $1 uses.
share_indexes_of_pip() {
  local key value
  while IFS="=" read -r key value; do
    value=${value//\'/}
    value=${value//\\n/ }
    case $key in
      *.index-url) export UV_DEFAULT_INDEX=$value ;;
      *.extra-index-url) export UV_INDEX=$value UV_INDEX_STRATEGY=unsafe-best-match ;;
      *.find-links) export UV_FIND_LINKS=${value// /,} ;;
    esac
  done < <("$1" -m pip config list)
}

# Creates the virtual environment $1 with Python $2 unless it exists, and installs maxlite with the
# extras $3 (`[test]` or empty) if setup.py or the versions have changed since the last installation.
# The versions are those of $4, by default constraints.txt; /dev/null installs the newest. uv takes a
# fifth of pip's time; pip installs where uv cannot.
fill_venv() {
  local venv=$1 python=$2 extras=$3 versions=${4:-constraints.txt}
  local stamp="$venv/installed$extras"
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || return
  if ! cat setup.py "$versions" | cmp -s - "$stamp"; then
    local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
    local packages=(--constraint "$versions" --editable ".$extras")
    share_indexes_of_pip "$venv/bin/python"
    { "${pip[@]}" --constraint "$versions" uv &&
      "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "${packages[@]}"; } ||
      "${pip[@]}" "${packages[@]}" || return
    cat setup.py "$versions" > "$stamp"
  fi
}
