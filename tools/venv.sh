# Sourced by test.sh, quickstart.sh and .ci/run: finds Python and installs into a virtual environment.

unset PYTHONDONTWRITEBYTECODE  # each process would compile all modules again

# Prints the path of Python 3.$1, found on the path or among the versions of pyenv, if it can create
# virtual environments.
find_python() {
  local minor=$1 candidate path
  local code="import ensurepip, sys; print(sys.executable); sys.exit(sys.version_info[:2] != (3, $minor))"
  for candidate in "python3.$minor" python3 "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor".*/bin/python3; do
    if path=$("$candidate" -c "$code" 2>/dev/null); then
      echo "$path"
      return
    fi
  done
  return 1
}

# Prints the path of the newest Python that constraints.txt has versions for, or $PYTHON if it is set.
newest_python() {
  local minor
  if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" && return
    echo "PYTHON=$PYTHON is not a command; write the path of a Python >= 3.11" >&2
    return 1
  fi
  for minor in 14 13 12 11; do
    find_python "$minor" && return
  done
  echo "no Python 3.11 to 3.14; install one, or name it: PYTHON=/path/to/python3 $0" >&2
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
# extras $3 (`[test]` or empty) if setup.py or constraints.txt have changed since the last
# installation. An environment that was made here with another version of Python is made again. uv
# takes a fifth of pip's time; pip installs where uv cannot.
fill_venv() {
  local venv=$1 python=$2 extras=$3
  local stamp="$venv/installed$extras"
  if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv" || return
  elif compgen -G "$venv/installed*" >/dev/null && ! same_version "$python" "$venv/bin/python"; then
    "$python" -m venv --clear "$venv" || return
  fi
  if ! cat setup.py constraints.txt | cmp -s - "$stamp"; then
    local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
    local packages=(--constraint constraints.txt --editable ".$extras")
    share_indexes_of_pip "$venv/bin/python"
    { "${pip[@]}" --constraint constraints.txt uv &&
      "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "${packages[@]}"; } ||
      "${pip[@]}" "${packages[@]}" || return
    cat setup.py constraints.txt > "$stamp"
  fi
}

# Succeeds if two Pythons have the same minor version.
same_version() {
  local code="import sys; print(sys.version_info[:2])"
  [ "$("$1" -c "$code")" = "$("$2" -c "$code")" ]
}
