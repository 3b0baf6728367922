"""Incremental text equals the text of all tokens, and no character is ever retracted."""

import io
import itertools

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from maxlite.config.schema import DataConfig
from maxlite.data.tokenizer import open_tokenizer
from maxlite.inference.batcher import LENGTH, STOP, TokenEvent
from maxlite.inference.detokenizer import Detokenizer
from maxlite.inference.engine import GenerationRequest

REQUEST = GenerationRequest([0], 99)
BYTES = open_tokenizer(DataConfig())
WORDS = ["the", " cat", " sat", "s", ",", " ", "  ", "\n", "é", "世界", "🌍", " 🌍"]


def stream(ids, *stop_strings, tokenizer=BYTES, prompt=()):
  """(pieces of the text, finish reason) of a completion, up to the first stop string."""
  detokenizer = Detokenizer(tokenizer, prompt, stop_strings)
  pieces = []
  reason = ""
  for n, token in enumerate(ids):
    last = ""
    if n == len(ids) - 1:
      last = LENGTH
    piece, reason = detokenizer.push(TokenEvent(REQUEST, int(token), last))
    pieces.append(piece)
    if reason:
      break
  return pieces, reason


def byte_level_bpe(path):
  """As GPT, Llama 3 and Qwen."""
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
  tokenizer.train_from_iterator([" the cat sat on the 世界 the 世界"], trainer)
  return save(tokenizer, path)


def pieces_with_bytes():
  """A vocabulary of SentencePiece in tokenizer.json."""
  pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
  pieces += ["▁", "▁▁", "▁the", "▁cat", "▁sat", "s", "the", ",", "世", "界"]
  return Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, [], unk_token="<unk>"))


def llama_2(path):
  """The space before a text is prepended by a normalizer, and stripped by the decoder."""
  tokenizer = pieces_with_bytes()
  tokenizer.normalizer = normalizers.Sequence(
    [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
  )
  tokenizer.decoder = decoders.Sequence(
    [
      decoders.Replace("▁", " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(" ", 1, 0),
    ]
  )
  return save(tokenizer, path)


def metaspace(path):
  """The space before a text is the pre-tokenizer's and the decoder's."""
  tokenizer = pieces_with_bytes()
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
  tokenizer.decoder = decoders.Sequence(
    [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
  )
  return save(tokenizer, path)


def gemma(path):
  """No space is stripped."""
  tokenizer = pieces_with_bytes()
  tokenizer.normalizer = normalizers.Replace(" ", "▁")
  tokenizer.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
  )
  return save(tokenizer, path)


def word_piece(path):
  vocabulary = ["the", "cat", "sat", "##s", ",", ".", "[UNK]"]
  tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(vocabulary)}))
  tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
  tokenizer.decoder = decoders.WordPiece()
  return save(tokenizer, path)


def save(tokenizer, path):
  tokenizer.add_special_tokens(["<s>", "</s>", "<sep>"])
  tokenizer.save(str(path / "tokenizer.json"))
  return DataConfig(tokenizer_type="huggingface", tokenizer_path=str(path / "tokenizer.json"))


def sentencepiece_model(path):
  sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is an extra")
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["the cat sat on the mat"] * 20),
    model_writer=model,
    vocab_size=290,
    model_type="bpe",
    byte_fallback=True,
    hard_vocab_limit=False,
    minloglevel=2,
  )
  (path / "spm.model").write_bytes(model.getvalue())
  return DataConfig(tokenizer_type="sentencepiece", tokenizer_path=str(path / "spm.model"))


KINDS = [byte_level_bpe, llama_2, metaspace, gemma, word_piece, sentencepiece_model]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def tokenizer(request, tmp_path):
  return open_tokenizer(request.param(tmp_path))


def drawn_ids(tokenizer, rng, num_parts):
  """The ids of some words, lone bytes, and special tokens."""
  ids = []
  for _ in range(num_parts):
    kind = rng.integers(10)
    if kind < 5:
      ids += tokenizer.encode(rng.choice(WORDS).encode()).tolist()
    elif kind < 8:
      ids += rng.integers(tokenizer.size, size=rng.integers(1, 5)).tolist()
    else:
      ids.append(tokenizer.eos)
  return ids


def test_pieces_add_up_to_the_text_of_all_tokens(tokenizer):
  rng = np.random.default_rng(0)
  for _ in range(300):
    prompt = tokenizer.encode(rng.choice(WORDS[:3]).encode()).tolist()
    prompt += [tokenizer.eos] * int(rng.integers(2))
    ids = drawn_ids(tokenizer, rng, int(rng.integers(1, 12)))
    pieces, _ = stream(ids, tokenizer=tokenizer, prompt=prompt)
    whole = tokenizer.decode([*prompt, *ids])
    assert tokenizer.decode(prompt) + "".join(pieces) == whole, (prompt, ids)


def test_without_a_prompt_pieces_add_up_to_the_text_of_the_completion(tokenizer):
  rng = np.random.default_rng(1)
  for _ in range(200):
    ids = drawn_ids(tokenizer, rng, 6)
    for prompt in ([], [tokenizer.eos]):
      pieces, _ = stream(ids, tokenizer=tokenizer, prompt=prompt)
      assert "".join(pieces) == tokenizer.decode(ids), ids


def test_the_first_word_keeps_its_space(tmp_path):
  tokenizer = open_tokenizer(llama_2(tmp_path))
  the, cat, sat = (tokenizer._tokenizer.token_to_id(piece) for piece in ("▁the", "▁cat", "▁sat"))
  sep = tokenizer.special_tokens["<sep>"]
  assert stream([cat, sat], tokenizer=tokenizer, prompt=[1, the]) == ([" cat", " sat"], LENGTH)
  assert stream([cat, sat], tokenizer=tokenizer, prompt=[1, the, sep])[0] == [" cat", " sat"]
  assert stream([sep, cat, sep, sat], tokenizer=tokenizer, prompt=[the])[0] == [
    "",
    " cat",
    "",
    " sat",
  ]
  assert stream([the, cat], tokenizer=tokenizer, prompt=[1])[0] == ["the", " cat"]
  stopped = stream([sat, cat, the], " sat", tokenizer=tokenizer, prompt=[1, the])
  assert stopped == ([""], STOP)
  assert stream([sep, cat, sat], " cat", tokenizer=tokenizer, prompt=[1, the]) == (["", ""], STOP)


@pytest.mark.parametrize("kind", [llama_2, metaspace, gemma])
def test_a_run_of_bytes_is_valid_or_invalid_as_a_whole(kind, tmp_path):
  tokenizer = open_tokenizer(kind(tmp_path))
  ids = [tokenizer._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in b"\xc3\xa9\xff"]
  comma = tokenizer._tokenizer.token_to_id(",")
  prompt = tokenizer.encode(b"the")
  assert stream([*ids[:2], comma], tokenizer=tokenizer, prompt=prompt)[0] == ["", "", "é,"]
  whole = "\N{REPLACEMENT CHARACTER}" * 3 + ","
  assert stream([*ids, comma], tokenizer=tokenizer, prompt=prompt)[0] == ["", "", "", whole]
  separated = [*ids[:2], tokenizer.eos, ids[2], comma]  # special tokens do not end a run
  assert "".join(stream(separated, tokenizer=tokenizer, prompt=prompt)[0]) == whole
  # The end of the text is the end of a run, and so is a stop string.
  assert stream(ids[:2], tokenizer=tokenizer, prompt=prompt)[0] == ["", "é"]
  assert stream([*ids, comma], "é", tokenizer=tokenizer, prompt=prompt) == (["", ""], STOP)


@pytest.mark.parametrize("num_in_prompt", [1, 2, 3])
def test_a_character_may_begin_in_the_prompt(num_in_prompt):
  text = "🌍".encode()
  completion = text[num_in_prompt:] + b"!"
  pieces, _ = stream(completion, prompt=b"earth: " + text[:num_in_prompt])
  assert "".join(pieces) == "🌍!"


@pytest.mark.parametrize("text", ["plain", "Grüße, 世界 🌍!", "é"])
def test_a_character_is_released_with_its_last_byte(text):
  pieces, reason = stream(text.encode())
  assert ("".join(pieces), reason) == (text, LENGTH)
  assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
  last_bytes = [len(text[: n + 1].encode()) - 1 for n in range(len(text))]
  assert [n for n, piece in enumerate(pieces) if piece] == last_bytes


def test_invalid_bytes_are_released_at_the_end_at_the_latest():
  pieces, _ = stream(b"a\xffb\xc3")
  assert "".join(pieces) == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
  ("text", "stop_strings", "kept"),
  [
    ("one two three", [" three"], "one two"),
    ("one two three", ["zzz", "two", " t"], "one"),
    ("aaab", ["aab"], "a"),
    ("aaab", ["aaaa"], "aaab"),
    ("ends with the beginning </e", ["</end>"], "ends with the beginning </e"),
    ("weiß nicht", ["ß"], "wei"),
  ],
)
def test_text_ends_before_the_first_stop_string(text, stop_strings, kept):
  pieces, reason = stream(text.encode(), *stop_strings)
  assert "".join(pieces) == kept
  assert reason == (STOP if kept != text else LENGTH)
  # Every intermediate text is a prefix of the final one.
  assert all(kept.startswith(text) for text in itertools.accumulate(pieces))


def test_a_stop_token_has_no_text():
  detokenizer = Detokenizer(BYTES, [])
  assert detokenizer.push(TokenEvent(REQUEST, ord("a"))) == ("a", "")
  assert detokenizer.push(TokenEvent(REQUEST, None, STOP)) == ("", STOP)
