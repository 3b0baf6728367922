#!/usr/bin/env bash
# Check and time all kernels and training steps on the accelerator of this machine within 8 minutes:
#
#   tools/bench/accelerator.sh TABLE.md [--small] [--minutes N] [part ...]
#
# See accelerator.py. PYTHON is the interpreter, by default python3. Packages that it lacks are
# installed into .venv-accelerator, which has all others in the interpreter's versions. Without a
# network: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER_OF_WHEELS. If that fails, the table has the reason.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
venv="$root/.venv-accelerator"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

can_train() { "$1" -c "import maxlite.training.trainer, rich.table" 2>/dev/null; }

install_missing() {
  "$python" -m venv --without-pip "$venv" || return
  # The interpreter may be that of a virtual environment, which --system-site-packages would skip.
  "$python" - "$venv" <<'PY' || return
import pathlib, site, sys
folder = next(pathlib.Path(sys.argv[1]).glob("lib/python*/site-packages"))
(folder / "interpreter.pth").write_text("\n".join(site.getsitepackages()))
PY
  # The installed JAX and its plugin are those of the driver.
  "$python" -m pip freeze 2>/dev/null | grep -E "^(jax|numpy)[a-z0-9-]*==" > "$venv/versions.txt"
  "$python" - "$root/setup.py" > "$venv/requirements.txt" <<'PY' || return
import ast, importlib.metadata, re, sys
tree = ast.parse(open(sys.argv[1]).read())
nodes = (node for node in ast.walk(tree) if isinstance(node, ast.keyword))
normal = lambda name: re.sub("[-_.]+", "-", name).lower()
installed = {normal(each.name) for each in importlib.metadata.distributions()}
for requirement in ast.literal_eval(next(n.value for n in nodes if n.arg == "install_requires")):
  if normal(re.match(r"[\w.-]+", requirement)[0]) not in installed:
    print(requirement)
PY
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$venv/versions.txt" --requirement "$venv/requirements.txt"
}

note=""
if ! can_train "$python"; then
  log=$(mktemp)
  if [ -x "$venv/bin/python" ] && can_train "$venv/bin/python"; then
    python="$venv/bin/python"
  elif install_missing > "$log" 2>&1 && can_train "$venv/bin/python"; then
    python="$venv/bin/python"
  else
    missing=$("$python" -c "import maxlite.training.trainer, rich.table" 2>&1 | tail -1)
    note="packages were not installed: $missing; pip: $(grep -m1 -i error "$log" || tail -1 "$log")"
  fi
fi
exec "$python" "$root/tools/bench/accelerator.py" "$@" ${note:+--note "$note"}
