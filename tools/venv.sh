# Sourced by test.sh and quickstart.sh: finds a Python and fills a virtual environment.

# Prints the newest Python from 3.$1 on that really runs ($PYTHON, where set, is the only choice).
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

# Makes the virtual environment $1 with Python $2 unless it exists, and installs maxlite with the
# extras $3 (`[test]`, or empty) unless that was done since setup.py last changed.
fill_venv() {
  local venv=$1 python=$2 extras=$3
  local stamp="$venv/installed$extras"
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || return
  if ! cmp -s setup.py "$stamp"; then
    "$venv/bin/python" -m pip install --quiet --upgrade pip || return
    # setuptools warns of folders beside the package, which configs/ is meant to be.
    PYTHONWARNINGS=ignore "$venv/bin/python" -m pip install --quiet --editable ".$extras" || return
    cp setup.py "$stamp"
  fi
}
