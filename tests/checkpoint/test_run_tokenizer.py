"""A run owns its tokenizer: a copy in its folder, with digests, found from anywhere."""

import json
import shutil

import pytest

from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config import load_config
from maxlite.config.saved import read_saved
from maxlite.config.schema import build, flatten
from maxlite.config.schema.data_config import DataConfig
from maxlite.data.sources.chat import open_chat
from maxlite.data.tokenizer import open_tokenizer
from maxlite.errors import UserError
from maxlite.hf.hf_tokenizer import byte_tokenizer


def write_tokenizer(folder, eos="<|end_of_text|>", template="{{ messages[0].content }}"):
  folder.mkdir(parents=True)
  byte_tokenizer().save(str(folder / "tokenizer.json"))
  config = {"eos_token": eos, "chat_template": template}
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  return folder / "tokenizer.json"


@pytest.fixture
def source(tmp_path):
  return write_tokenizer(tmp_path / "source")


def start(tmp_path, path, *, name="mine", **keys):
  """Start a run as training does; return its folder."""
  keys |= {"tokenizer_path": path, "base_output_directory": tmp_path / "runs", "run_name": name}
  argv = [f"{key}={value}" for key, value in keys.items()]
  cfg = load_config(["tokenizer_type=huggingface", *argv])
  folder = RunFolder(tmp_path / "runs" / name)
  folder.save_config(cfg, folder.config_changes(flatten(cfg)))
  return folder


def data_of(folder):
  """The data section of the saved config, as all commands read it."""
  return build(DataConfig, read_saved(folder.config))


def test_a_moved_run_has_its_tokenizer(tmp_path, source, monkeypatch):
  monkeypatch.chdir(tmp_path)
  start(tmp_path, "source/tokenizer.json")
  identity = open_tokenizer(data_of(RunFolder("runs/mine"))).identity
  shutil.rmtree(source.parent)
  (tmp_path / "elsewhere").mkdir()
  moved = tmp_path / "elsewhere" / "moved"
  shutil.move("runs/mine", moved)
  monkeypatch.chdir(tmp_path / "elsewhere")
  tokenizer = open_tokenizer(data_of(RunFolder(moved)))
  assert tokenizer.identity == identity
  assert tokenizer.chat_template == "{{ messages[0].content }}"


def test_a_replaced_source_changes_nothing(tmp_path, source):
  folder = start(tmp_path, source)
  shutil.rmtree(source.parent)
  write_tokenizer(source.parent, eos="<|begin_of_text|>")
  assert open_tokenizer(data_of(folder)).eos == 257


@pytest.mark.parametrize("changed", ["tokenizer.json", "tokenizer_config.json"])
def test_a_resume_with_another_tokenizer_is_refused(tmp_path, source, changed):
  start(tmp_path, source)
  file = source.parent / changed
  file.write_text(file.read_text() + "\n")
  with pytest.raises(UserError, match=r"tokenizer_path=.*set tokenizer_path="):
    start(tmp_path, source)


def test_a_resume_with_an_equal_tokenizer_elsewhere_changes_nothing(tmp_path, source):
  folder = start(tmp_path, source)
  elsewhere = tmp_path / "elsewhere"
  shutil.copytree(source.parent, elsewhere)
  start(tmp_path, elsewhere / "tokenizer.json")
  assert not (folder.directory / "config.1.yml").exists()
  start(tmp_path, elsewhere / "tokenizer.json", steps=999)
  assert (folder.directory / "config.1.yml").exists()
  assert data_of(folder).tokenizer_path == str(folder.tokenizer / "tokenizer.json")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_changed_copy_is_refused(tmp_path, source, name):
  folder = start(tmp_path, source)
  file = folder.tokenizer / name
  file.write_text(file.read_text().replace("end_of_text", "end_of_texs"))
  with pytest.raises(UserError, match=f"{name} is not the file that the run was made with"):
    open_tokenizer(data_of(folder))


def test_a_run_owns_its_chat_template(tmp_path, source):
  template = tmp_path / "given.jinja"
  template.write_text("given {{ messages[0].content }}")
  folder = start(tmp_path, source, chat_template_path=template)
  template.write_text("another")
  cfg = data_of(folder)
  assert open_chat(cfg, open_tokenizer(cfg)) is not None
  copy = folder.tokenizer / "given_template.jinja"
  assert cfg.chat_template_path == str(copy)
  copy.write_text("changed")
  with pytest.raises(UserError, match=r"given_template\.jinja is not the file"):
    open_chat(cfg, open_tokenizer(DataConfig()))


def test_a_missing_source_names_the_copy(tmp_path, source):
  folder = start(tmp_path, source)
  shutil.rmtree(source.parent)
  with pytest.raises(
    UserError, match=f"tokenizer_path={folder.tokenizer}/tokenizer.json, the copy"
  ):
    start(tmp_path, source)
  start(tmp_path, folder.tokenizer / "tokenizer.json")


def test_a_config_of_a_run_as_a_file_names_its_tokenizer(tmp_path, source):
  folder = start(tmp_path, source)
  cfg = load_config([str(folder.config), "run_name=other"])
  assert cfg.data.tokenizer_path == str(folder.tokenizer / "tokenizer.json")


def test_a_run_of_an_earlier_version_gets_its_copy_at_the_next_start(tmp_path, source):
  folder = start(tmp_path, source)
  shutil.rmtree(folder.tokenizer)
  text = folder.config.read_text().replace("{run}/tokenizer/tokenizer.json", str(source))
  folder.config.write_text(text)
  start(tmp_path, source)
  assert data_of(folder).tokenizer_path == str(folder.tokenizer / "tokenizer.json")


def test_an_import_of_an_earlier_version_can_be_moved(tmp_path, source):
  folder = start(tmp_path, source)
  (folder.tokenizer / "tokenizer.sha256").unlink()
  text = folder.config.read_text().replace("{run}/", "runs/of/an/earlier/day/")
  folder.config.write_text(text)
  assert data_of(folder).tokenizer_path == str(folder.tokenizer / "tokenizer.json")


def test_files_of_an_interrupted_first_start_of_another_tokenizer_are_kept(tmp_path, source):
  folder = start(tmp_path, source)
  folder.config.unlink()
  start(tmp_path, source)  # the same one: nothing to decide
  folder.config.unlink()
  other = write_tokenizer(tmp_path / "other", eos="<|begin_of_text|>")
  with pytest.raises(UserError, match="of an earlier start with another tokenizer_path"):
    start(tmp_path, other)
