"""Templates may use the Jinja2 features of published ones, and render as in `transformers`."""

import datetime
import gc
import itertools
import json
from importlib.util import find_spec

import pytest
from support.interrupts import interrupted_before_line

from maxlite.data.sources import template_worker
from maxlite.data.sources.chat_template import ChatTemplate
from maxlite.data.tokenizer import ESCAPE
from maxlite.errors import UserError

TODAY = datetime.date(2025, 3, 4)
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture
def impatient_worker(monkeypatch):
  monkeypatch.setattr(template_worker, "CPU_SECONDS", 1)
  template_worker._stop_idle()
  yield
  template_worker._stop_idle()


# Features of published templates, each with its output for CONVERSATION.
FEATURES = {
  "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }}{% endfor %}{{ eos_token }}": (
    "<s>suau</s>"
  ),
  # A namespace outlives the loop that sets it.
  "{% set ns = namespace(last=-1) %}{% for m in messages[::-1] %}"
  "{% if ns.last < 0 and m.role == 'user' %}{% set ns.last = messages | length - 1 - loop.index0 %}"
  "{% endif %}{% endfor %}{{ ns.last }}": "3",
  "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.index }}"
  "{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}": "23",
  "{{ messages[0] | tojson }}": '{"role": "system", "content": "Be <b>, é & \\"q\\"\\n"}',
  "{{ {'b': [1, none], 'a': true} | tojson(indent=1, sort_keys=True) }}": (
    '{\n "a": true,\n "b": [\n  1,\n  null\n ]\n}'
  ),
  "{{ {'é': 1} | tojson(ensure_ascii=True, separators=(',', ':')) }}": '{"\\u00e9":1}',
  "{{ strftime_now('%d %B %Y') }}": "04 March 2025",
  "{% if tools is not none %}tools{% endif %}{% if documents %}documents{% endif %}"
  "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}"
  "{{ date | default('today', true) }}": "today",
  "{% for m in messages if m.content is string and m.content is not mapping %}"
  "{{ loop.cycle('a', 'b') ~ loop.last }}{% endfor %}": "aFalsebFalseaFalsebTrue",
  "{%- macro turn(role, text='-') -%}[{{ role | upper }}: {{ text | trim }}]{%- endmacro -%}"
  "{{ turn('x') }} {{ turn(messages[1].role, messages[1].content) }}": "[X: -] [USER: two?]",
  "{{ messages[2].content.split('</think>')[-1].lstrip('\\n') }}|"
  "{{ messages[2].content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].strip() }}": (
    "It is two.|so"
  ),
  "{{ messages[1:] | map(attribute='role') | join(',') }} {{ messages[-1]['content'] }}": (
    "user,assistant,user three?"
  ),
  "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
  "{{ messages[3].get('name', 'none') }}{{ messages[3].items() | list | count }}": "2none2",
  "  {% if true %}\n  x\n  {%- endif %}\n  {# left out #}\n{{- 'y' }}": "  xy",
  "{% for m in messages %}{% generation %}{{ m.role[0] }}{% endgeneration %}{% endfor %}": "suau",
  "{% if add_generation_prompt is defined and not add_generation_prompt %}{{ '%.2f' % 1.5 }}"
  "{% endif %}": "1.50",
}
CONVERSATION = [
  {"role": "system", "content": 'Be <b>, é & "q"\n'},
  {"role": "user", "content": " two? "},
  {"role": "assistant", "content": "<think>\nso\n</think>\n\nIt is two."},
  {"role": "user", "content": "three?"},
]


def template_of(source):
  return ChatTemplate(
    source, place="it", special_tokens_map=NAMES, special_tokens=["</s>"], today=lambda: TODAY
  )


@pytest.mark.parametrize(("source", "expected"), FEATURES.items(), ids=range(len(FEATURES)))
def test_features_of_templates(source, expected):
  assert template_of(source).render(CONVERSATION) == expected


def test_raise_exception_gives_the_message():
  source = "{% if messages[0].role != 'user' %}{{ raise_exception('users first') }}{% endif %}"
  with pytest.raises(ValueError, match=r"^it: users first$"):
    template_of(source).render(CONVERSATION)


@pytest.mark.parametrize(
  ("source", "message"),
  [
    ("{{ 10 ** (10 ** 8) }}", "is not a Jinja2 template: it takes more than 1 seconds"),
    ("{{ 10 ** (messages | length * 10 ** 8) }}", "it: it takes more than 1 seconds"),
    (
      "{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}",
      "it: it takes more than 1 seconds",
    ),
    (
      "{% set x = namespace(y='a') %}{% for n in range(99) %}{% set x.y = x.y * 2 %}{% endfor %}",
      "it: it takes more than (512 MB|1 seconds)",  # whichever limit is reached first
    ),
    ("{{ 'a' | center(2 ** 25) }}", "output of 33554432 characters exceeds 16777216"),
    ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "is not a Jinja2 template: "),
  ],
  ids=["constant power", "power", "loops", "doubling", "output", "parentheses"],
)
def test_a_template_has_limits(impatient_worker, source, message):
  """Of time, memory and output; the next template renders."""
  with pytest.raises(ValueError, match=message):
    template_of(source).render(CONVERSATION)
  assert template_of("{{ messages | length }}").render(CONVERSATION) == "4"


READS_PARTS = (
  "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
  "{% for part in m.content %}{{ part.text }}{{ ',' if not loop.last }}{% endfor %}"
  "{% endif %};{% endfor %}"
)


@pytest.mark.parametrize(
  ("source", "expected"),
  [
    ("{% for m in messages %}{{ m.content + ';' }}{% endfor %}", "ab;c;"),
    ("{% for m in messages %}{{ m.content }};{% endfor %}", "ab;c;"),
    (READS_PARTS, "a,b;c;"),
  ],
)
def test_templates_get_text_parts_if_they_read_them(source, expected):
  parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
  messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]
  assert template_of(source).render(messages) == expected


# Templates that look into messages, in which special tokens are spelled.
CURIOUS = [
  "{% for m in messages %}{{ m.content | length ~ m.content[:5] }}|{{ m.content[5:] }}{% endfor %}",
  "{{ messages | tojson }}</s>",
  "{{ messages | tojson(ensure_ascii=true, indent=2) }}</s>",
  "{{ messages[0].content.split('</s>') | join('+') }}</s>",
  "{{ '</s>' in messages[0].content }}{{ messages[0].content | replace('</s>', '') | upper }}</s>",
  "{{ messages[1].content | reverse }}{{ messages[0].content | center(99) }}",
  "{{ messages[0].content | list | last }}{{ messages[0].keys() | list }}</s>",
]
SPELLED = [
  {"role": "user", "content": "é </s> b</s"},
  {"role": "assistant", "content": "<<|x|></s>/"},
]


@pytest.mark.parametrize("source", CURIOUS)
def test_templates_see_messages_as_they_are(source):
  specials = ["</s>", "<|x|>"]
  template = ChatTemplate(
    source, place="it", special_tokens_map=NAMES, special_tokens=specials, today=lambda: TODAY
  )
  blind = ChatTemplate(
    source, place="it", special_tokens_map=NAMES, special_tokens=[], today=lambda: TODAY
  )
  text = template.render(SPELLED)
  assert text.replace(ESCAPE, "") == blind.render(SPELLED)
  # Only the template's own special token is one.
  assert [token for token in specials if token in text.removesuffix("</s>")] == []


@pytest.mark.parametrize(
  "source",
  [
    "{{ messages[0].content | length }}{{ messages[0].content.split('</s>') | join }}",
    "{{ messages[0].items() | list }}",  # Python escapes the marks
  ],
)
def test_a_template_that_confuses_special_tokens_of_messages_is_refused(source):
  with pytest.raises(UserError, match=r"special tokens that a message spells.*: remove them"):
    template_of(source).render(SPELLED)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # abandoned workers
def test_an_interrupt_leaves_no_answer_for_the_next_request():
  """Before whichever line of the module it arrives."""

  def rendered(n):
    return template_worker.render("{{ n }}", TODAY, n=n)

  for n in itertools.count():
    rendered(-1)  # a worker is idle
    try:
      with interrupted_before_line(template_worker.__file__, n):
        rendered(n)
    except KeyboardInterrupt:
      assert rendered(n + 1) == f"{n + 1}"
    else:
      assert n > 10
      break
  gc.collect()  # while the warnings are filtered


def test_a_worker_that_is_killed_is_replaced():
  template = template_of("{{ messages | length }}")
  ((worker,),) = template_worker._IDLE.values()
  worker.kill()
  assert template.render(CONVERSATION) == "4"


REASONING = [
  "{% for m in messages %}{{ m.reasoning_content ~ '</think>' ~ m.content }};{% endfor %}",
  "{% for m in messages %}{{ m.thinking }}{{ m.keys() | list }}{% endfor %}",
  "{% for m in messages %}{{ m.reasoning }}{{ m | tojson }}{% endfor %}",
]


@pytest.mark.hf
@pytest.mark.skipif(
  not find_spec("transformers"), reason="needs transformers: pip install -e .[hf]"
)
def test_output_equals_transformers():
  from transformers.utils.chat_template_utils import render_jinja_template

  cases = [(source, CONVERSATION) for source in FEATURES if "strftime_now" not in source]
  for source in REASONING:
    names = ("reasoning_content", "reasoning", "thinking")
    for values in itertools.product([None, "", "so"], repeat=3):
      fields = {}
      for name, value in zip(names, values, strict=True):
        if value is not None:  # apply_chat_template leaves out null fields
          fields[name] = value
      cases.append((source, [{"role": "assistant", "content": "a", **fields}]))
  for source, conversation in cases:
    (theirs,), _ = render_jinja_template([conversation], chat_template=source, **NAMES)
    assert template_of(source).render(conversation) == theirs, json.dumps(source)


@pytest.mark.parametrize(
  "source",
  [
    "\ufdd1",
    "\ufdd1\ufdd2",
    "{{ '\\ufdd1' }}",
    "\ufdd2{% generation %}a{% endgeneration %}\ufdd1",
  ],
)
def test_a_template_that_prints_the_marks_of_answers_is_refused(source):
  with pytest.raises(UserError, match=r"prints .*, which mark the answers: remove"):
    template_of(source).render([{"role": "user", "content": "a"}])
