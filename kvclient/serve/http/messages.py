"""Anthropic's messages API: what a request may say, and the chat request that it is here.

Owns its names and limits. Never computes, and shapes no answer (answers/messages.py does). Invariant: a field
that is not here is refused by name, a block of another kind too; what is taken means what it means there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvclient.serve.errors import ApiError, unsupported
from kvclient.serve.http.schema import (
    MOST_STOP_CHARS,
    MOST_STOPS,
    MOST_TOOLS,
    CacheOptions,
    ChatRequest,
    Repair,
    Strict,
)


class Ephemeral(Strict):
    """A mark of what is to be cached. Here every prompt is, so it changes nothing."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(BaseModel):
    """Other fields of a block come back from clients with answers, as they hold them."""

    model_config = ConfigDict(extra="ignore", strict=True)
    cache_control: Ephemeral | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: None = None


class ToolUse(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool = False


class Thinking(Block):
    """What a model thought before comes back with its answer, and is not told to it again."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""
    signature: str = ""
    data: str = ""


Said = Annotated[TextBlock | ToolUse | ToolResult | Thinking, Field(discriminator="type")]


class Turn(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | list[Said]


class Tool(Strict):
    cache_control: Ephemeral | None = None
    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(Strict):
    user_id: str | None = None


class ThinkingOptions(Strict):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    format: OutputFormat | None = None


class Counted(Strict):
    """What makes a prompt."""

    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[Tool] = Field([], max_length=MOST_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    cache_control: Ephemeral | None = None


class MessagesRequest(Counted):
    """metadata and service_tier change nothing here, and are taken. cache, kv_codec, repair: as in the other
    APIs.
    """

    max_tokens: int = Field(ge=0)  # 0: the prompt is computed, so that its KV is there
    stop_sequences: list[str] = Field([], max_length=MOST_STOPS)
    stream: bool = False
    temperature: float = Field(1.0, ge=0, le=5)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    cache: CacheOptions = CacheOptions()
    kv_codec: Literal["none", "int8", "int4"] | None = None
    repair: Repair | None = None


def as_chat(asked: Counted, thinks: bool) -> ChatRequest:
    """thinks: whether the model's template knows of thinking. Raises ApiError."""
    more: dict[str, Any] = {}
    if isinstance(asked, MessagesRequest):
        if any(not 0 < len(stop) <= MOST_STOP_CHARS for stop in asked.stop_sequences):
            text = f"stop_sequences: 1 to {MOST_STOP_CHARS} characters each"
            raise ApiError(400, text, param="stop_sequences")
        more = {
            "max_tokens": asked.max_tokens, "stop": asked.stop_sequences, "stream": asked.stream,
            "temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k,
            "cache": asked.cache, "kv_codec": asked.kv_codec, "repair": asked.repair,
        }  # fmt: skip
    if asked.output_config is not None and asked.output_config.format is not None:
        schema = {"name": "answer", "schema": asked.output_config.format.schema_}
        more["response_format"] = {"type": "json_schema", "json_schema": schema}
    if (thinking := _thinking(asked.thinking, thinks)) is not None:
        more["chat_template_kwargs"] = {"enable_thinking": thinking}
    messages = [message for turn in _merged(asked.messages) for message in _spoken(turn)]
    if asked.system:
        messages.insert(0, {"role": "system", "content": _text(asked.system)})
    return ChatRequest(
        model=asked.model, messages=messages, tools=[_tool(tool) for tool in asked.tools],
        tool_choice=_choice(asked.tool_choice), parallel_tool_calls=_parallel(asked.tool_choice),
        continue_final_message=messages[-1]["role"] == "assistant",
        **more,
    )  # fmt: skip


def _thinking(asked: ThinkingOptions | None, thinks: bool) -> bool | None:
    if asked is None or (asked.type == "disabled" and not thinks):
        return None
    if asked.type == "enabled":  # its budget is required, and nothing here bounds thoughts by themselves
        raise unsupported("thinking.budget_tokens", "max_tokens bounds thoughts and answer; say adaptive")
    if not thinks:
        raise unsupported("thinking", "this model does not think aloud")
    return asked.type == "adaptive"


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema,
                "strict": tool.strict}  # fmt: skip
    return {"type": "function", "function": function}


def _choice(asked: ToolChoice | None) -> Any:
    if asked is None:
        return "auto"
    if asked.type == "tool":
        if asked.name is None:
            raise ApiError(400, "tool_choice.name is needed beside type tool", param="tool_choice")
        return {"type": "function", "function": {"name": asked.name}}
    return "required" if asked.type == "any" else asked.type


def _parallel(asked: ToolChoice | None) -> bool | None:
    return False if asked is not None and asked.disable_parallel_tool_use else None


def _merged(turns: Sequence[Turn]) -> list[Turn]:
    """Turns of one role that follow each other are one."""
    out: list[Turn] = []
    for turn in turns:
        blocks: list[Any] = (
            [TextBlock(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
        )
        if out and out[-1].role == turn.role:
            out[-1] = Turn(role=turn.role, content=[*out[-1].content, *blocks])
        else:
            out.append(Turn(role=turn.role, content=list(blocks)))
    return out


def _spoken(turn: Turn) -> list[dict[str, Any]]:
    """A turn as messages of a chat: results of tools are messages of their own, in their order."""
    out: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    text: list[str] = []

    def told() -> None:
        if text:
            out.append({"role": turn.role, "content": "\n".join(text)})
            text.clear()

    for block in turn.content:
        if isinstance(block, TextBlock):
            text.append(block.text)
        elif isinstance(block, ToolUse) and turn.role == "assistant":
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResult) and turn.role == "user":
            told()
            said = ("error: " if block.is_error else "") + _text(block.content)
            out.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": said})
        elif not (isinstance(block, Thinking) and turn.role == "assistant"):
            raise ApiError(400, f"a block {block.type} in a turn of the {turn.role}", param="messages")
    if calls:
        out.append({"role": "assistant", "content": "\n".join(text), "tool_calls": calls})
        return out
    told()
    return out or [{"role": turn.role, "content": ""}]


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
