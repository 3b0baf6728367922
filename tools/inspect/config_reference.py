"""Writes docs/config.md, the reference of every key, from the schema; --check only compares.

python tools/inspect/config_reference.py [--check]
"""

import itertools
import sys
from pathlib import Path

from maxlite.config.schema import KEYS, Key
from maxlite.config.values import domain, show

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"
COMMAND = "python tools/inspect/config_reference.py"
INTRODUCTION = f"""\
# Every key

Made from `maxlite/config/schema` by `{COMMAND}`; do not edit.

Keys are flat. Write `key: value` in a YAML file, `key=value` or `--key=value` on the command line
(`--key` and `--nokey` where the value is true or false). What counts, the later the more: the
defaults below, the `base_config` of the YAML files, the files from left to right, the preset that
`model_name` names, `key=value`, `--key=value`. A run keeps the keys marked * for life, because its
weights depend on them. A mapping is written on the command line as in YAML, in quotes:
`'members=[{{learning_rate: 1e-3}}, {{base_emb_dim: 64}}]'`.
"""


def reference() -> str:
  """The page as Markdown: one table per section of the schema."""
  sections = itertools.groupby(KEYS.values(), lambda key: key.section)
  return INTRODUCTION + "".join(_table(section, list(keys)) for section, keys in sections)


def _table(section: type, keys: list[Key]) -> str:
  head = f"\n## {section.__name__.removesuffix('Config')}\n\n{section.__doc__}\n\n"
  return (
    head + "| key | value | default | meaning |\n|---|---|---|---|\n" + "".join(map(_row, keys))
  )


def _row(key: Key) -> str:
  name = f"`{key.name}`" + ("*" if key.field.shapes_model else "")
  cells = (name, domain(key), f"`{show(key.default)}`", key.field.doc)
  return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def main(arguments: list[str]) -> int:
  """The exit code: 1 where --check finds the page stale."""
  if arguments == ["--check"]:
    fresh = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == reference()
    print(f"{PAGE.name} is fresh" if fresh else f"{PAGE.name} is stale; run {COMMAND}")
    return 0 if fresh else 1
  PAGE.parent.mkdir(exist_ok=True)
  PAGE.write_text(reference(), encoding="utf-8")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
