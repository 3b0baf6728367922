"""Generate docs/config.md, the reference of all keys, from the schema; --check only compares.

python tools/inspect/config_reference.py [--check]
"""

import sys
from pathlib import Path

from maxlite.config.help_text import default_of, entries_in, inherited_keys, own_keys
from maxlite.config.raw_values import show
from maxlite.config.saved import MACHINE_KEYS
from maxlite.config.schema import ENTRIES, KEYS, SECTIONS, SchemaKey
from maxlite.config.values import domain

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"
COMMAND = "python tools/inspect/config_reference.py"
INTRODUCTION = f"""\
# Configuration reference

Generated from `maxlite/config/schema` by `{COMMAND}`; do not edit.

Keys are flat. Write `key: value` in a YAML file, `key=value` or `--key=value` on the command line
(`--key` and `--nokey` for true and false). Later sources override earlier ones: the defaults below,
the `base_config` chain of each file, the files from left to right, the preset that `model_name`
selects, `key=value`, `--key=value`. The saved config of a run, `config.yml`, is taken as it is,
without its preset. A key on the command line is obeyed or refused: one that a command does not
read, or that has no effect beside the others, is an error; files may have more keys, for several
commands. A file may also be Python ([below](#configs-in-python)).

Keys marked * are fixed for the lifetime of a run folder, because its weights depend on them. Keys
marked † name code, or places of this machine: the config of a run folder does not set them for the
commands that open it ([api.md](api.md)). Mappings use YAML syntax on the command line, in quotes:
`'members=[{{learning_rate: 1e-3}}, {{base_emb_dim: 64}}]'`.

## Configs in Python

A file `my_config.py` with a function `get_config` stands for a YAML file, on the command line, in
`base_config` and in `maxlite.train`:

```python
import ml_collections


def get_config():
  config = ml_collections.ConfigDict()
  config.base_config = "configs/base.yml"  # relative to this file
  config.steps = 200
  config.warmup_steps_fraction = 20 / config.steps
  return config
```

```sh
python -m maxlite.train my_config.py steps=10
python -m maxlite.train --config=my_config.py --config.steps=10  # as with ml_collections
```

`my_config.py:small` calls `get_config("small")`. A plain dict will do, too. A `ConfigDict` sorts
its keys; where their order matters, as in `sweep`, return a dict. The function may be called more
than once, so its result should not depend on time or chance. `--config.KEY=value` is parsed by
`ml_collections.config_flags`, for the keys below.

A Python config is code that every command given its name runs: read the file of someone else
before. A YAML file runs code if its `base_config` or `plugins` name Python files. A run folder
never contains a Python config: its `config.yml` holds the resolved values.
"""


def reference() -> str:
  """The page in Markdown, one table per section of the schema."""
  page = INTRODUCTION
  for keys in SECTIONS.values():
    page += _table(keys)
  return page


def _table(keys: list[SchemaKey]) -> str:
  section = keys[0].section
  title = section.__name__.removesuffix("Config")
  lines = [
    f"\n## {title}\n",
    f"{section.__doc__}\n",
    "| key | value | default | doc |",
    "|---|---|---|---|",
  ]
  for key in keys:
    lines.append(_row(key))
  page = "\n".join(lines) + "\n"
  for key in keys:
    for name in entries_in(key.name):
      page += _entry_table(name)
  return page


def _entry_table(name: str) -> str:
  """The keys of the mappings that a key holds."""
  entry = ENTRIES[name]
  lines = [
    f"\n### Keys of `{name}`\n",
    f"{entry.__doc__}\n",
    "| key | value | default | doc |",
    "|---|---|---|---|",
  ]
  for key in own_keys(entry):
    default = default_of(key)
    if default.startswith("default "):
      default = f"`{default.removeprefix('default ')}`"
    lines.append(_cells(f"`{key.name}`", domain(key), default, key.field.doc))
  inherited = [f"`{each}`" if each in KEYS else each for each in inherited_keys(entry)]
  if inherited:
    lines.append(f"\nAlso, instead of the run's: {', '.join(inherited)}.")
  return "\n".join(lines) + "\n"


def _row(key: SchemaKey) -> str:
  name = f"`{key.name}`"
  if key.field.shapes_model:
    name += "*"
  if key.name in MACHINE_KEYS:
    name += "†"
  default = f"`{show(key.default)}`"
  return _cells(name, domain(key), default, key.field.doc)


def _cells(*cells: str) -> str:
  escaped = [cell.replace("|", "\\|") for cell in cells]
  return f"| {' | '.join(escaped)} |"


def main(argv: list[str]) -> int:
  """Returns the exit code: 1 if --check finds the page out of date."""
  if argv == ["--check"]:
    is_current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == reference()
    if not is_current:
      print(f"{PAGE.name} is out of date; run {COMMAND}")
      return 1
    print(f"{PAGE.name} is up to date")
    return 0
  PAGE.write_text(reference(), encoding="utf-8")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
