"""OpenAI's responses API: what a request may say, and the chat request that it is here.

Owns its names and limits. Never computes, and shapes no answer (answers/responses.py does). Invariant: a
field that is not here is refused by name.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from kvclient.serve.http.schema import (
    MOST_TOOLS,
    CacheOptions,
    ChatRequest,
    Function,
    JsonSchema,
    Message,
    Part,
    Repair,
    Strict,
)


class FunctionCall(BaseModel):
    """A call as an answer had it, given back."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionResult(BaseModel):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]


class Reasoned(BaseModel):
    """What a model thought comes back with its answer, and is not told to it again."""

    type: Literal["reasoning"]


class ResponseTool(Function):
    type: Literal["function"]


class ResponseChoice(Strict):
    type: Literal["function"]
    name: str


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Strict):
    format: TextFormat | None = None


class ResponsesRequest(Strict):
    """store, user, safety_identifier, prompt_cache_key, metadata and truncation "disabled" change nothing
    here, and are taken.
    """

    model: str | None = None
    input: str | list[FunctionCall | FunctionResult | Reasoned | Message]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=5)
    top_p: float = Field(1.0, gt=0, le=1)
    stream: bool = False
    tools: list[ResponseTool] = Field([], max_length=MOST_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | ResponseChoice = "auto"
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    store: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    cache: CacheOptions = CacheOptions()
    kv_codec: Literal["none", "int8", "int4"] | None = None
    repair: Repair | None = None


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """Calls that follow each other, and what was said around them, are one message of the assistant, behind
    which their results come: so templates want it.
    """
    said: list[dict[str, Any]] = []
    if request.instructions:
        said.append({"role": "system", "content": request.instructions})
    asked_now = request.input
    for item in [Message(role="user", content=asked_now)] if isinstance(asked_now, str) else asked_now:
        if isinstance(item, Message):
            last = said[-1] if said else {}
            if item.role == "assistant" and last.get("tool_calls"):
                words = [last["content"], item.plain()["content"]]
                said[-1] = {**last, "content": "\n".join(filter(None, words))}
            else:
                said.append({**item.model_dump(), "content": item.plain()["content"]})
        elif isinstance(item, FunctionCall):
            if not (said and said[-1]["role"] == "assistant"):
                said.append({"role": "assistant", "content": ""})
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            said[-1]["tool_calls"] = [*(said[-1].get("tool_calls") or []), call]
        elif isinstance(item, FunctionResult):
            output = item.output if isinstance(item.output, str) else [p.model_dump() for p in item.output]
            said.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    asked, choice = request.text.format if request.text else None, request.tool_choice
    if not isinstance(choice, str):
        choice = {"type": "function", "function": {"name": choice.name}}
    shape = None
    if asked is not None:
        schema = asked.model_dump(by_alias=True, exclude={"type"})
        shape = {"type": asked.type, "json_schema": schema if asked.type == "json_schema" else None}
    return ChatRequest(
        model=request.model, messages=said, max_tokens=request.max_output_tokens, stream=request.stream,
        temperature=request.temperature, top_p=request.top_p, response_format=shape, tool_choice=choice,
        tools=[{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in request.tools],
        parallel_tool_calls=request.parallel_tool_calls, cache=request.cache, kv_codec=request.kv_codec,
        repair=request.repair,
    )  # fmt: skip
