"""Prompts are read as texts or conversations, and encoded as documents or by the chat template."""

import json

import pytest

from maxlite.config import load_config
from maxlite.config.schema import GenerateConfig
from maxlite.inference.prompts import (
  Conversation,
  PromptEncoder,
  has_conversations,
  read_prompts,
)

TEMPLATE = (
  "{{ tools | length if tools else '' }}{{ mode or '' }}{% for m in messages %}"
  "{{ bos_token }}{{ m.role[0] }}:{{ m.content }}{{ eos_token if m.role == 'assistant' }}"
  "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
MESSAGES = [
  {"role": "user", "content": "hi"},
  {"role": "assistant", "content": "yo"},
  {"role": "user", "content": "go"},
]


@pytest.fixture
def cfg(tmp_path):
  (tmp_path / "t.jinja").write_text(TEMPLATE)
  return load_config([f"chat_template_path={tmp_path}/t.jinja", "max_new_tokens=3"])


def as_text(tokens):
  """The text of byte tokens, with < for bos and > for eos."""
  return "".join({256: "<", 257: ">"}.get(token, chr(token)) for token in tokens)


def test_a_text_is_encoded_as_the_start_of_a_document(cfg):
  encoder = PromptEncoder(cfg, chats=False)
  requests = encoder.requests(["hi", "go"])
  assert [as_text(request.prompt) for request in requests] == ["<hi", "<go"]
  assert [request.seed for request in requests] == [0, 1]


def test_a_conversation_is_encoded_by_the_template(cfg):
  encoder = PromptEncoder(cfg, chats=True)
  variables = {"tools": [1, 2], "mode": "m"}
  given = ["hi", Conversation(MESSAGES, {}), Conversation(MESSAGES[:1], variables)]
  texts = [as_text(request.prompt) for request in encoder.requests(given)]
  assert texts == ["<hi", "<u:hi<a:yo><u:goa:", "2m<u:hia:"]


def test_lines_of_a_file_are_texts_or_conversations(tmp_path):
  file = tmp_path / "prompts.jsonl"
  lines = [
    {"prompt": "hi"},
    {"messages": MESSAGES},
    {"messages": MESSAGES, "tools": [{"name": "f"}], "chat_template_kwargs": {"mode": "m"}},
  ]
  file.write_text("\n".join(map(json.dumps, lines)))
  prompts = read_prompts(GenerateConfig(prompt_file=str(file)))
  assert prompts == [
    "hi",
    Conversation(MESSAGES, {}),
    Conversation(MESSAGES, {"mode": "m", "tools": [{"name": "f"}]}),
  ]
  assert has_conversations(prompts)
  assert not has_conversations(prompts[:1])
  chats = read_prompts(GenerateConfig(prompt_file=str(file), use_chat_template=True))
  assert chats == [Conversation(MESSAGES[:1], {}), *prompts[1:]]


def test_a_prompt_may_be_the_message_of_a_user():
  (prompt,) = read_prompts(GenerateConfig(prompt="hi", use_chat_template=True))
  assert prompt == Conversation(MESSAGES[:1], {})


def test_prompts_that_are_not_text_are_read_with_question_marks(tmp_path):
  file = tmp_path / "prompts.jsonl"
  file.write_text('{"prompt": "\\ud800a"}')  # half of a surrogate pair
  for keys in ({"prompt_file": str(file)}, {"prompt": "\udcffa"}):  # a byte that is not UTF-8
    assert read_prompts(GenerateConfig(**keys)) == ["?a"]
