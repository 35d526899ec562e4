"""A chat as its model's template writes it.

Owns what templates want of messages and OpenAI's contract has otherwise: the arguments of a call as an
object, tools told to a template that knows none. Never reads tokens. Invariant: a call that comes back stands
in the prompt as the model was told to write it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvclient.serve.errors import ApiError, unprocessable

SHORT_IDS = "length != 9"  # in templates of mistral's, which refuse ids of calls that are longer
Told = dict[str, Any]


def rendered(tokenizer: Any, messages: Sequence[Told], tools: list[Told] | None, **keywords: Any) -> str:
    """The text. keywords: of apply_chat_template, and the template's own. Raises ApiError where the template
    refuses.
    """
    template = str(tokenizer.chat_template)
    plain = list(messages)
    if SHORT_IDS in template:
        plain = [short_ids(message) for message in plain]
    objects = [with_objects(message) for message in plain]
    arguments = [value for message in objects for value in arguments_of(message) if isinstance(value, dict)]
    # Most templates want objects; some set the text that came among others, and fail with an object, or show
    # it as Python does.
    for tried in (objects, plain) if arguments else (plain,):
        try:
            told = with_tools(tried, tools) if tools and "tools" not in template else tried
            text = str(tokenizer.apply_chat_template(told, tools=tools, tokenize=False, **keywords))
        except RecursionError as error:
            if tried is plain:
                where = "tools" if tools else "messages"
                raise ApiError(400, f"{where}: nested too deep for the chat template", param=where) from error
            continue
        except Exception as error:  # a template is a program of the model's author
            if tried is plain:
                text = f"the chat template refuses these messages: {error}"
                raise unprocessable(text, "messages") from error
            continue
        if tried is plain or not any(value and str(value) in text for value in arguments):
            break
    return text


def arguments_of(message: Told) -> list[Any]:
    """Those of a message's calls."""
    functions = (call.get("function") for call in message.get("tool_calls", ()))
    return [function.get("arguments") for function in functions if isinstance(function, dict)]


def with_objects(message: Told) -> Told:
    """The same, with the arguments of its calls as objects where they are text of one."""
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def _with_object(call: Told) -> Told:
    function = call.get("function")
    text = function.get("arguments") if isinstance(function, dict) else None
    try:
        told = json.loads(text or "{}") if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**call["function"], "arguments": told}} if isinstance(told, dict) else call


def short_ids(message: Told) -> Told:
    """The same with the last nine characters of its ids of calls."""

    def short(ident: Any) -> str:
        return str(ident or "")[-9:].rjust(9, "0")

    out = dict(message)
    if "tool_call_id" in out:
        out["tool_call_id"] = short(out["tool_call_id"])
    if "tool_calls" in out:
        out["tool_calls"] = [{**call, "id": short(call.get("id"))} for call in out["tool_calls"]]
    return out


def with_tools(messages: Sequence[Told], tools: list[Told]) -> list[Told]:
    """For a template that knows no tools: told in the system prompt, and earlier calls as text."""
    told = (
        "You may call these tools. To call one, answer with only a JSON object "
        '{"name": …, "arguments": {…}} inside <tool_call></tool_call>.\n' + json.dumps(tools)
    )
    out = []
    for message in messages:
        if calls := message.get("tool_calls"):
            spelled = "".join(f"<tool_call>{json.dumps(call.get('function'))}</tool_call>" for call in calls)
            message = {"role": "assistant", "content": message["content"] + spelled}
        elif message["role"] == "tool":
            message = {"role": "user", "content": f"<tool_response>{message['content']}</tool_response>"}
        out.append(message)
    if out and out[0]["role"] == "system":
        return [{"role": "system", "content": f"{out[0]['content']}\n\n{told}"}, *out[1:]]
    return [{"role": "system", "content": told}, *out]
