"""Log-probabilities of tokens in the schemas of completions, chats and prompts."""

from collections.abc import Sequence

from maxlite.data.tokenizer import ChatTokenizer, Tokenizer
from maxlite.inference.batcher import TokenEvent
from maxlite.inference.detokenizer import Detokenizer
from maxlite.inference.engine import GenerationRequest
from maxlite.inference.scoring import TokenScore
from maxlite.storage.json_values import JsonObject

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoded from the bytes of an incomplete character
_LOWEST = -9999.0  # JSON has no infinity


class Logprobs:
  """The log-probabilities of one sequence, a prompt with its completion.

  A token is named by the text that it adds to the token before it, a special token by its spelling.
  A token without such a name, or with that of a more likely one, is `token_id:N`.

  Args:
    tokenizer: decodes tokens.
    tokens: the sequence.
    scores: of every token; None for the first one.
    as_ids: name all tokens `token_id:N`.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    scores: Sequence[TokenScore | None],
    *,
    as_ids: bool,
  ) -> None:
    self._tokenizer = tokenizer
    self._tokens = list(tokens)
    self._scores = scores
    self._as_ids = as_ids
    self._spellings: dict[int, str] = {}
    if isinstance(tokenizer, ChatTokenizer):
      self._spellings = {i: spelling for spelling, i in tokenizer.special_tokens.items()}

  def of_completion(self, first: int, num_top: int) -> JsonObject:
    """The tokens from `first` on, as `logprobs` of a completion.

    A `text_offset` is the place of a token in their text. The token itself is in `top_logprobs`
    too, as one more if it is not one of the `num_top` most likely.
    """
    names: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[JsonObject | None] = []
    for n in range(first, len(self._tokens)):
      score = self._scores[n]
      if score is None:
        names.append(self._name(n, self._tokens[n]))
        token_logprobs.append(None)
        top_logprobs.append(None)
        continue
      likely = self._likely(n, score, num_top)
      names.append(likely[score.token][0])
      token_logprobs.append(_finite(score.log_prob))
      top_logprobs.append({name: _finite(log_prob) for name, log_prob in likely.values()})
    return {
      "tokens": names,
      "token_logprobs": token_logprobs,
      "top_logprobs": top_logprobs,
      "text_offset": self._offsets(first),
    }

  def of_chat(self, first: int, num_top: int) -> JsonObject:
    """The tokens from `first` on, as `logprobs` of an answer in a chat."""
    content = []
    for n in range(first, len(self._tokens)):
      score = self._scores[n]
      assert score is not None, "the first token of a chat is one of its prompt"
      likely = self._likely(n, score, num_top)
      most_likely = [_entry(*likely[token]) for token, _ in score.top[:num_top]]
      content.append(_entry(*likely[score.token]) | {"top_logprobs": most_likely})
    return {"content": content, "refusal": None}

  def of_prompt(self, num_tokens: int, num_top: int) -> list[JsonObject | None]:
    """The first `num_tokens` tokens, as vLLM's `prompt_logprobs`: by id, null for the first one."""
    positions: list[JsonObject | None] = []
    for n in range(num_tokens):
      score = self._scores[n]
      if score is None:
        positions.append(None)
        continue
      ranks = {token: rank for rank, (token, _) in enumerate(score.top[:num_top], 1)}
      ranks[score.token] = score.rank
      entries: JsonObject = {}
      for token, (name, log_prob) in self._likely(n, score, num_top).items():
        value = {"logprob": _finite(log_prob), "rank": ranks[token], "decoded_token": name}
        entries[str(token)] = value
      positions.append(entries)
    return positions

  def _likely(self, n: int, score: TokenScore, num_top: int) -> dict[int, tuple[str, float]]:
    """{token: (name, log-probability)} of the most likely tokens, and of the token itself."""
    log_probs = dict(score.top[:num_top])
    log_probs.setdefault(score.token, score.log_prob)
    likely: dict[int, tuple[str, float]] = {}
    used: set[str] = set()
    for token, log_prob in log_probs.items():
      name = self._name(n, token)
      if name in used:
        name = f"token_id:{token}"
      used.add(name)
      likely[token] = (name, log_prob)
    return likely

  def _name(self, n: int, token: int) -> str:
    """The name of `token` as the n-th one."""
    as_id = f"token_id:{token}"
    if self._as_ids:
      return as_id
    if token in self._spellings:
      return self._spellings[token]
    before = self._tokens[max(n - 1, 0) : n]
    known = self._tokenizer.decode(before)
    text = self._tokenizer.decode([*before, token])
    if not text.startswith(known) or _INCOMPLETE in text[len(known) :]:
      return as_id
    return text[len(known) :] or as_id

  def _offsets(self, first: int) -> list[int]:
    """The characters of the text before each token from `first` on."""
    detokenizer = Detokenizer(self._tokenizer, self._tokens[:first])
    request = GenerationRequest((), 0)
    offsets = []
    length = 0
    for token in self._tokens[first:]:
      offsets.append(length)
      length += len(detokenizer.push(TokenEvent(request, token)).text)
    return offsets


def _entry(name: str, log_prob: float) -> JsonObject:
  """A token of a chat; an id has no bytes."""
  text = None if name.startswith("token_id:") else list(name.encode())
  return {"token": name, "logprob": _finite(log_prob), "bytes": text}


def _finite(log_prob: float) -> float:
  return max(log_prob, _LOWEST)
