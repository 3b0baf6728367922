"""Rules on names, paths and secrets: what a file system, a store or an HTTP header can hold."""

import os

from maxlite.config.rules.violation import Violation, Violations
from maxlite.config.schema import DEFAULTS, Config, flatten
from maxlite.config.values import SECRETS

_MAX_NAME_BYTES = 255  # the most in the name of a file, on all usual file systems
_MAX_PATH_CHARACTERS = 4096
_PATH_ENDINGS = ("_path", "_directory", "_dir", "_file", "save_hlo", "gpu_target_config")
PATH_KEYS = tuple(key for key in DEFAULTS if key.endswith(_PATH_ENDINGS))
# Keys that may name a place on the Hugging Face Hub, and on an object store.
_HUB_KEYS = ("dataset_path", "eval_dataset_path", "tokenizer_path")
_STORE_KEYS = (
  *_HUB_KEYS,
  "base_output_directory",
  "token_cache_directory",
  "output_path",
  "jax_cache_dir",
)


def is_folder_name(name: str) -> bool:
  """Whether `name` is the name of one folder, as needed for a run or a member."""
  if not name or not name.isprintable() or name.startswith("."):
    return False
  has_slash = "/" in name or "\\" in name
  return not has_slash and len(name.encode()) <= _MAX_NAME_BYTES


def is_header_text(secret: str) -> bool:
  """Whether an HTTP header can hold `secret` as one word: visible ASCII without spaces."""
  return all("!" <= character <= "~" for character in secret)


def is_file(path: str) -> bool:
  """Whether `path` is a file of this machine, or a URI, which is looked up when it is opened."""
  return "://" in path or os.path.isfile(os.path.expanduser(path))


def paths(cfg: Config) -> Violations:
  """The rules on every path of every key."""
  values = flatten(cfg)
  for key in PATH_KEYS:
    value = values[key]
    if isinstance(value, str):
      value = (value,)
    for path in value:
      yield from _path(key, path)


def _path(key: str, path: str) -> Violations:
  expanded = os.path.expanduser(path)
  if expanded.startswith("~"):
    user = expanded.partition("/")[0].removeprefix("~")
    yield Violation([key], f"there is no user {user}; write a path without ~")
  if "\0" in path or _is_too_long(expanded):
    yield Violation(
      [key],
      f"is too long ({_MAX_NAME_BYTES} bytes per name, {_MAX_PATH_CHARACTERS} in all) or has a NUL "
      "character; write another path",
    )
  scheme, is_uri, _ = path.partition("://")
  if is_uri and scheme not in _schemes(key):
    places = ["a path on this machine"]
    for allowed in _schemes(key):
      places.append(f"{allowed}://")
    yield Violation([key], f"cannot be on {scheme}://; write {', or '.join(places)}")


def _is_too_long(path: str) -> bool:
  if len(path) >= _MAX_PATH_CHARACTERS:
    return True
  names = path.encode(errors="surrogatepass").split(b"/")
  return any(len(name) > _MAX_NAME_BYTES for name in names)


def _schemes(key: str) -> list[str]:
  """The schemes of URIs that a key may have."""
  schemes = []
  if key in _STORE_KEYS:
    schemes += ["s3", "gs"]
  if key in _HUB_KEYS:
    schemes.append("hf")
  return schemes


def secrets(cfg: Config) -> Violations:
  """The rule on every secret."""
  values = flatten(cfg)
  for key in SECRETS:
    if not is_header_text(values[key]):
      yield Violation(
        [key],
        "has a character that HTTP headers cannot have; write visible ASCII without spaces",
      )


PATH_RULES = (paths, secrets)
