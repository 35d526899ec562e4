"""Proves that what was called and answered comes to the model as its template writes it.

Method: excerpts of the templates of qwen, deepseek, glm and mistral, rendered by transformers; the call that
a client gives back against the text that the model had said.
"""

import json
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from kvclient.serve.errors import ApiError
from kvclient.serve.http.asking import Asking
from kvclient.serve.http.schema import ChatRequest, Message

TEXT = '{"city": "Zürich",  "days": 2}'
EACH = "{%- for m in messages %}{%- for c in m.tool_calls or [] %}"
ENDS = "{%- endfor %}{%- endfor %}"
TEMPLATES = {
    "qwen": (EACH + "{%- set c = c.function %}{{ c.name }}:{{ c.arguments | tojson }}" + ENDS, False),
    "deepseek": (EACH + "{{ c['function']['name'] + ':' + c['function']['arguments'] + '' }}" + ENDS, True),
    "printed": (EACH + "{{ c.function.name }}:{{ c.function.arguments }}" + ENDS, True),
    "glm": (EACH + "{{ c.function.name }}:{ {%- for k, v in c.function.arguments.items() %}{{ ',' if not "
            "loop.first }}{{ k | tojson }}:{{ v | tojson }}{%- endfor %} }" + ENDS, False),
    "none": ("{%- for m in messages %}{{ m.content }}{%- endfor %}", False),
}  # fmt: skip
MISTRAL = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}{%- if not m.tool_call_id is defined or "
    "m.tool_call_id|length != 9 %}{{ raise_exception('ids have length 9') }}{%- endif %}"
    "{{ m.tool_call_id }}={{ m.name }}:{{ m.content }}{%- endif %}{%- for c in m.tool_calls or [] %}"
    "{%- if not c.id is defined or c.id|length != 9 %}{{ raise_exception('ids have length 9') }}{%- endif %}"
    "{{ c.id }}!{%- endfor %}{%- endfor %}"
)


class Rendered:
    """A tokenizer whose tokens are the letters of what its template makes."""

    def __init__(self, template):
        self.chat_template = template
        self._inner = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
        self._inner.chat_template = template

    def apply_chat_template(self, *args, **kwargs):
        return self._inner.apply_chat_template(*args, **kwargs)

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) for letter in text]}


def written(template, messages, tools=()):
    loop = SimpleNamespace(identity=b"", limits=None)
    asking = Asking(Rendered(template), "tiny", loop, 1000, 1 << 20)
    return "".join(map(chr, asking.chat_tokens([Message(**message) for message in messages], tools)))


def called(arguments, ident="call_0123456789abcdef"):
    call = {"id": ident, "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_arguments_of_a_call_are_an_object_and_the_text_that_came_where_a_template_wants_text(name):
    template, as_text = TEMPLATES[name]
    tools = ChatRequest(messages=[{"role": "user", "content": "x"}],
                        tools=[{"type": "function", "function": {"name": "look"}}]).tools  # fmt: skip
    said = written(template, [called(TEXT)], tools if name == "none" else ())
    if name == "none":  # the template knows no tools: written as the model was told to
        call = json.loads(said.split("<tool_call>")[-1].split("</tool_call>")[0])
        assert call == {"name": "look", "arguments": json.loads(TEXT)}
        return
    before, _, arguments = said.partition(":")
    assert before == "look" and json.loads(arguments) == json.loads(TEXT)
    assert (arguments == TEXT) == as_text


@pytest.mark.parametrize(("arguments", "wanted"), [("", "{}"), ("no JSON", '"no JSON"'), ("[1]", '"[1]"')])
def test_what_is_no_object_comes_as_it_is(arguments, wanted):
    assert written(TEMPLATES["qwen"][0], [called(arguments)]) == f"look:{wanted}"


def test_an_answer_says_which_call_it_is_of_and_ids_fit_a_template_that_takes_nine_characters():
    answer = {"role": "tool", "name": "look", "tool_call_id": "call_0123456789abcdef", "content": "three"}
    assert written(MISTRAL, [called(TEXT), answer]) == "789abcdef!789abcdef=look:three"
    short = {**answer, "tool_call_id": "7"}
    assert written(MISTRAL, [called(TEXT, "7"), short]) == "000000007!000000007=look:three"


def test_likeliest_tokens_are_not_asked_for_without_their_logprobs():
    asked = ChatRequest(messages=[{"role": "user", "content": "x"}], top_logprobs=2)
    asking = Asking(Rendered("x"), "tiny", SimpleNamespace(identity=b"", limits=None), 1000, 1 << 20)
    with pytest.raises(ApiError, match="logprobs"):
        asking.chat(asked)
