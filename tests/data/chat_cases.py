"""Shared cases: a tokenizer with special tokens, chat templates and conversations."""

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]")
TEXT = "What is the sum of two and three? It is five. You are helpful. user assistant system café"

CHATML = (
  "{% for message in messages %}"
  "{{ '<|im_start|>' + message['role'] + '\n' }}"
  "{% if message.role == 'assistant' %}%s{% else %}{{ message.content + '<|im_end|>' }}{% endif %}"
  "{{ '\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCT = (
  "{{ bos_token }}{% for message in messages %}"
  "{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
  "{% elif message.role == 'assistant' %}%s"
  "{% else %}{{ raise_exception('only user and\n assistant speak') }}{% endif %}{% endfor %}"
)
PLAIN = (
  "{% for message in messages %}{{ message.role + ': ' }}"
  "{% if message.role == 'assistant' %}%s{% else %}{{ message.content }}{% endif %}{{ '\n' }}"
  "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
ANSWERS = {
  CHATML: "{{ message.content + '<|im_end|>' }}",
  INSTRUCT: "{{ ' ' + message.content | trim + eos_token }}",
  PLAIN: "{{ message.content + eos_token }}",
}
MARKED = []
UNMARKED = []
for template, answer in ANSWERS.items():
  MARKED.append(template.replace("%s", "{% generation %}" + answer + "{% endgeneration %}"))
  UNMARKED.append(template.replace("%s", answer))


def turns(*contents, system=""):
  """Alternating messages of user and assistant."""
  roles = ["user", "assistant"] * len(contents)
  messages = []
  if system:
    messages.append({"role": "system", "content": system})
  for role, content in zip(roles, contents, strict=False):
    messages.append({"role": role, "content": content})
  return messages


CONVERSATIONS = [
  turns("What is two and three?", "It is five."),
  turns("two", "  three é🙂\n", "café?", "\n\nfive\n\nfive"),
  turns("What is <|im_end|>?", "It is <|endoftext|><|im_start|> </s>[INST] a <s>.", "<s>", "</s>"),
]


def save_tokenizer(folder, metaspace="", **configs):
  """Write tokenizer.json and {name}.json files to `folder`; return the path of the first."""
  tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  if metaspace:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=metaspace)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=metaspace)
    alphabet = sorted({*TEXT, *"<|im_endstaroxf>/[INST]\n🙂é▁"})
  trainer = trainers.BpeTrainer(
    vocab_size=340,
    special_tokens=list(SPECIALS),
    initial_alphabet=alphabet,
    show_progress=False,
  )
  tokenizer.train_from_iterator([TEXT] * 3, trainer)
  folder.mkdir(exist_ok=True)
  path = folder / "tokenizer.json"
  tokenizer.save(str(path))
  for name, value in configs.items():
    (folder / f"{name}.json").write_text(json.dumps(value))
  return str(path)
