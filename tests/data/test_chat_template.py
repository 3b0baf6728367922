"""Templates may use all of Jinja2 that published ones do, and come out as `transformers` has it."""

import datetime
import json
from importlib.util import find_spec

import pytest

from maxlite.data.sources.chat_template import ChatTemplate

TODAY = datetime.date(2025, 3, 4)
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}

# Of which each is all that is left of a message's turn; with what it writes for TALK.
FEATURES = {
  "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }}{% endfor %}{{ eos_token }}": (
    "<s>suau</s>"
  ),
  # A namespace outlives the loop that sets it; the last question is found from behind.
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
TALK = [
  {"role": "system", "content": 'Be <b>, é & "q"\n'},
  {"role": "user", "content": " two? "},
  {"role": "assistant", "content": "<think>\nso\n</think>\n\nIt is two."},
  {"role": "user", "content": "three?"},
]


def template_of(source):
  return ChatTemplate(source, place="it", names=NAMES, specials=["</s>"], today=lambda: TODAY)


@pytest.mark.parametrize(("source", "written"), FEATURES.items(), ids=range(len(FEATURES)))
def test_what_templates_use(source, written):
  assert template_of(source).render(TALK) == written


def test_a_template_that_raises_is_told_in_its_words():
  source = "{% if messages[0].role != 'user' %}{{ raise_exception('users first') }}{% endif %}"
  with pytest.raises(ValueError, match=r"^it: users first$"):
    template_of(source).render(TALK)


@pytest.mark.hf
@pytest.mark.skipif(
  not find_spec("transformers"), reason="needs transformers: pip install -e .[hf]"
)
def test_transformers_writes_the_same():
  from transformers.utils.chat_template_utils import render_jinja_template

  for source in FEATURES:
    if "strftime_now" not in source:  # of which it knows today's alone
      (theirs,), _ = render_jinja_template([TALK], chat_template=source, **NAMES)
      assert template_of(source).render(TALK) == theirs, json.dumps(source)
