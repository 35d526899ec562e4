"""What a request may say, field by field, with its bounds. Fields that are not here are refused by name.

Owns the names and limits of OpenAI's contract as this server keeps it, and of its extensions. Never computes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic import Strict as Strictness

MOST_STOPS, MOST_STOP_CHARS, MOST_CHOICES, MOST_TOOLS = 16, 256, 16, 64
Tokens = list[int]
Repair = Literal["none", "calibrated", "auto", "selective", "cacheblend", "attention"]
Id = Annotated[int, Strictness(False)]  # of a token; as a name in JSON it is a text


class Strict(BaseModel):
    """What is null is not said: clients spell out what they leave to the server. What is of another kind than
    its field is refused: no number is a text, or true.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _unsaid(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class StreamOptions(Strict):
    include_usage: bool = False


class CacheOptions(Strict):
    """salt: shares KV only with requests under the same. read, write: whether the store is. priority, ttl_s:
    of the blocks that are written.
    """

    salt: str = Field("", max_length=256)
    read: bool = True
    write: bool = True
    priority: int | None = Field(None, ge=0, le=100)
    ttl_s: float | None = Field(None, ge=1, le=365 * 86400)


class WindowOptions(Strict):
    """What of a chat is kept: `recent` tokens as computed, `older` ones before those quantised, the rest but
    the system prompt dropped.
    """

    recent: int = Field(512, ge=16, le=1 << 16)
    older: int = Field(2048, ge=0, le=1 << 17, multiple_of=32)
    codec: Literal["int8", "int4"] = "int8"


class Common(Strict):
    """Of all ways to ask. What is of the account (user, metadata, store, service_tier, safety_identifier) and
    prompt_cache_key change nothing here, and are taken.
    """

    model: str | None = None
    temperature: float = Field(1.0, ge=0, le=5)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # 0 or, as vLLM has it, -1: all
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=5)
    logit_bias: dict[Id, float] | None = Field(None, max_length=1024)
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    max_tokens: int | None = Field(None, ge=0)
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    cache: CacheOptions = CacheOptions()
    kv_codec: Literal["none", "int8", "int4"] | None = None
    repair: Repair | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @field_validator("top_k")
    @classmethod
    def _all(cls, value: int) -> int:
        return max(0, value)

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and not info.data.get("stream"):
            raise ValueError("only with stream: true")
        return value

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: Any) -> list[str]:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MOST_STOPS or any(len(stop) > MOST_STOP_CHARS for stop in stops):
            raise ValueError(f"at most {MOST_STOPS} stop strings of {MOST_STOP_CHARS} characters")
        if "" in stops:
            raise ValueError("a stop string of no characters")
        return stops

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, value: Any) -> Any:
        wrong = next((bias for bias in (value or {}).values() if not -100 <= bias <= 100), None)
        if wrong is not None:
            raise ValueError(f"a bias must be in -100..100, not {wrong!r}")
        return value


class Function(Strict):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(BaseModel):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Part(Strict):
    """annotations, logprobs: come back with the parts of an answer of /v1/responses, and change nothing."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Message(BaseModel):
    """Other fields of a message (annotations, audio: null) come back from clients with the answers of
    others."""

    model_config = ConfigDict(extra="ignore", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the {self.role} wants content")
        return self

    def plain(self) -> dict[str, Any]:
        """For a chat template."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        out: dict[str, Any] = {"role": role, "content": content or ""}
        if self.tool_calls:
            out["tool_calls"] = self.tool_calls
        told = {"name": self.name, "tool_call_id": self.tool_call_id}
        return out | {name: value for name, value in told.items() if value is not None}


class ChatRequest(Common):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] = Field([], max_length=MOST_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False  # the answer goes on where the last message ends
    window: WindowOptions | None = None


class CompletionRequest(Common):
    prompt: str | Tokens | list[str] | list[Tokens]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = None
    suffix: None = None


class TokenizeRequest(Strict):
    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Tokens


class WarmRequest(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    cache: CacheOptions = CacheOptions()
