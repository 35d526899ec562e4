"""A request of the contract as jobs of the loop: its tokens, its sampling, and what of it cannot be had.

Owns that translation and the tokenizer. Never computes and never answers. Invariant:
what this server cannot do is an ApiError that names it, before anything is computed.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from kvclient.blocks.codec import Kivi
from kvclient.hf.call import FAILURES
from kvclient.hf.engine.window import MOST_POSITIONS, Window
from kvclient.serve.engine.job import Job
from kvclient.serve.engine.loop import Loop
from kvclient.serve.engine.sampling import Sampler, Sampling
from kvclient.serve.engine.text import Text
from kvclient.serve.engine.windowed import Windowing
from kvclient.serve.errors import ApiError, too_large, too_long, unprocessable, unsupported
from kvclient.serve.http.grammar import Grammars, Matcher, call_schema
from kvclient.serve.http.messages import Counted
from kvclient.serve.http.messages import as_chat as messages_as_chat
from kvclient.serve.http.reasoning import OPEN
from kvclient.serve.http.responses import ResponsesRequest
from kvclient.serve.http.responses import as_chat as responses_as_chat
from kvclient.serve.http.schema import (
    CacheOptions,
    ChatRequest,
    Common,
    CompletionRequest,
    Message,
    NamedTool,
    TokenizeRequest,
)
from kvclient.serve.http.template import rendered
from kvclient.serve.keys import Keys

DEFAULT_NEW_TOKENS = 1024


@dataclass(frozen=True)
class Ask:
    """prompt: token ids. shape: which answer is wanted: a text, a tool's call, or either."""

    prompt: list[int]
    new_tokens: int
    sampling: Sampling
    request: Common
    schema: dict[str, Any] | None = None
    constrained: bool = False
    matcher: Matcher | None = None  # what keeps an answer to the schema
    tools: bool = False
    forced_tool: bool = False
    strict_tools: bool = False  # it may call them or not, but by their schemas
    echo: bool = False
    windowing: Windowing | None = None
    reasoning: bool | None = None  # it may think aloud; True: the prompt opens that already. None: never

    @property
    def kept(self) -> bool:
        """Whether a grammar says which tokens may come."""
        return self.constrained or self.strict_tools


class Asking:
    """keys: who may ask, and whose KV is whose."""

    def __init__(
        self, tokenizer: Any, model_name: str, loop: Loop, max_tokens: int, vocabulary: int,
        keys: Iterable[bytes] = (), ends: frozenset[int] = frozenset(), store: str = "",
        repair: str = "none",
    ) -> None:  # fmt: skip
        self.store, self.repair = store, repair  # names the KV it reads, for a router; inside prompts
        self.tokenizer, self.model_name, self.loop, self.max_tokens = tokenizer, model_name, loop, max_tokens
        self._keys = Keys(keys)
        self._ends, self._vocabulary = ends, vocabulary
        signature = inspect.signature(PreTrainedTokenizerBase.apply_chat_template)
        self._template_words = {*signature.parameters, "messages", "chat_template"}
        self.grammars = Grammars(tokenizer, vocabulary, ends)
        self.fingerprint = "kv_" + hashlib.sha256(loop.identity).hexdigest()[:12]
        self.card = {
            "id": model_name, "object": "model", "created": int(time.time()), "owned_by": "kvclient-serve",
            "max_model_len": max_tokens,
        }  # fmt: skip

    def apart(self) -> Asking:
        """The same for another thread, which reads long texts: a tokenizer is one thread's at a time."""
        other = copy.copy(self)
        other.tokenizer = copy.deepcopy(self.tokenizer)
        return other

    # ---------------------------------------------------------------- who asks

    def salt_of(self, authorization: bytes | None, plain: bytes | None = None) -> bytes:
        """What the KV of who asks is under, by these headers. Raises ApiError 401."""
        if (salt := self._keys.salt_of(authorization, plain)) is None:
            text = "a valid API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, text, "authentication_error")
        return salt

    def store_stats(self) -> dict[str, Any]:
        """The namespace's figures; empty while there is no daemon, or the store fails."""
        try:
            return dict(self.loop.store_stats())
        except FAILURES:
            return {}

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) for another model's name."""
        if name is not None and name != self.model_name:
            text = f"the model {name!r:.100} does not exist; this server has {self.model_name!r}"
            raise ApiError(404, text, code="model_not_found", param="model")

    # ---------------------------------------------------------------- what is asked

    def chat(self, request: ChatRequest) -> list[Ask]:
        """The answers that a chat request asks for. Raises ApiError for what cannot be had."""
        self.check_model(request.model)
        named = isinstance(request.tool_choice, NamedTool)
        tools = request.tools if request.tool_choice != "none" else []
        if (named or request.tool_choice == "required") and not tools:
            raise ApiError(400, "tool_choice wants a tool, and tools has none", param="tool_choice")
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, "top_logprobs wants logprobs=true", param="top_logprobs")
        prompt = self._chat_prompt(request)
        wanted = request.max_completion_tokens
        wanted = request.max_tokens if wanted is None else wanted
        sampling = self._sampling(request, request.top_logprobs if request.logprobs else None)
        schema, constrained = self._format(request), False
        if request.response_format is not None and request.response_format.type != "text":
            constrained = True
        forced = named or request.tool_choice == "required"
        if forced:
            schema, constrained = tool_schema(tools, request.tool_choice), True
        strict = not constrained and any(tool.function.strict for tool in tools)
        if strict and request.ignore_eos:
            raise unsupported("ignore_eos", "behind its end nothing keeps a strict tool's schema")
        window = self._windowing(request, tools, prompt)
        return [
            self._ask(prompt, wanted, sampling, request, schema=schema, constrained=constrained,
                      tools=bool(tools), forced_tool=forced, strict_tools=strict, windowing=window,
                      reasoning=None if constrained else self._thinks(prompt))
        ]  # fmt: skip

    def _thinks(self, prompt: list[int]) -> bool | None:
        if OPEN not in str(getattr(self.tokenizer, "chat_template", "")):
            return None
        return str(self.tokenizer.decode(prompt[-8:])).rstrip().endswith(OPEN)

    def _windowing(self, request: ChatRequest, tools: Sequence[Any], prompt: list[int]) -> Windowing | None:
        """Where in the prompt its system prompt ends, and the turn before the last question."""
        kept, keywords = request.window, request.chat_template_kwargs or {}
        if kept is None:
            return None
        if request.kv_codec is not None:
            raise unsupported("kv_codec", "a window has a codec of its own")
        if request.n != 1:
            raise unsupported("n", "a window has one answer a turn")
        for name in ("priority", "ttl_s"):
            if getattr(request.cache, name) is not None:
                raise unsupported(f"cache.{name}", "what a window holds is kept like any other block")

        def first(count: int) -> int:
            if not count:
                return 0
            try:
                told = self.chat_tokens(request.messages[:count], tools, keywords, "closed")
            except ApiError:  # a template that wants a question behind
                return 0
            return next((i for i, pair in enumerate(zip(told, prompt, strict=False)) if pair[0] != pair[1]),
                        min(len(told), len(prompt)))  # fmt: skip

        roles = [message.role for message in request.messages]
        answered = max((i + 1 for i, role in enumerate(roles) if role == "assistant"), default=0)
        head = first(1) if roles[0] in ("system", "developer") else 0
        window = Window(kept.recent, kept.older, codec=Kivi.named(kept.codec))
        return Windowing(window, head, first(answered))

    def completion(self, request: CompletionRequest) -> list[Ask]:
        """The answers that a completion request asks for, of each prompt. Raises ApiError for what cannot be
        had.
        """
        self.check_model(request.model)
        if request.best_of is not None and request.best_of != request.n:
            raise unsupported("best_of", "ask for n answers and choose")
        if request.suffix is not None:
            raise unsupported("suffix")
        prompts: list[Any] = (
            [request.prompt]
            if isinstance(request.prompt, str) or (request.prompt and isinstance(request.prompt[0], int))
            else list(request.prompt)
        )
        if not prompts or len(prompts) > 64:
            raise ApiError(400, f"{len(prompts)} prompts; 1 to 64 are taken at once", param="prompt")
        sampling = dataclasses.replace(self._sampling(request, request.logprobs), continues=True)
        wanted = 16 if request.max_tokens is None else request.max_tokens
        if wanted == 0 and not request.echo:
            raise ApiError(400, "max_tokens=0 has an answer only with echo", param="max_tokens")
        return [
            self._ask(self.tokens(prompt), wanted, sampling, request, echo=request.echo) for prompt in prompts
        ]

    def responses(self, request: ResponsesRequest) -> list[Ask]:
        """The same of /v1/responses. Raises ApiError for tools that no JSON could tell back, too."""
        try:
            told_back = [tool.model_dump() for tool in request.tools]
            json.dumps(told_back, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:  # half a surrogate pair, or no number
            raise ApiError(400, f"what is no JSON in tools: {error}", param="tools") from error
        if not isinstance(request.input, str) and not request.input:
            raise ApiError(400, "input has no item", param="input")
        return self.chat(responses_as_chat(request))

    def messages(self, request: Counted) -> list[Ask]:
        """The same of /v1/messages."""
        return self.chat(self.messages_as_chat(request))

    def messages_as_chat(self, request: Counted) -> ChatRequest:
        """What /v1/messages asks, said as a chat."""
        return messages_as_chat(request, OPEN in str(getattr(self.tokenizer, "chat_template", "")))

    def tokenized(self, asked: TokenizeRequest) -> list[int]:
        """The ids of a text or a chat. Raises ApiError where there is neither, or more than one."""
        texts = {asked.prompt, asked.content} - {None}  # vLLM's word, and llama.cpp's
        told = len(texts) + (asked.messages is not None)
        if told != 1:
            text = "one of prompt, content and messages is needed"
            raise ApiError(400, f"{text}; {told} are there", param="prompt")
        if asked.messages is not None:
            return self.chat_tokens(asked.messages)
        text = str(texts.pop())
        text.encode()
        return list(self.tokenizer(text, add_special_tokens=asked.add_special_tokens)["input_ids"])

    def count(self, request: Counted) -> int:
        """The tokens of its prompt."""
        chat = self.messages_as_chat(request)
        self.check_model(chat.model)
        return len(self._chat_prompt(chat))

    def _chat_prompt(self, request: ChatRequest) -> list[int]:
        tools = request.tools if request.tool_choice != "none" else []
        ends = "continued" if request.continue_final_message else "opened"
        if ends == "continued" and request.messages[-1].role != "assistant":
            text = "continue_final_message wants a message of the assistant at the end"
            raise ApiError(400, text, param="continue_final_message")
        return self.chat_tokens(request.messages, tools, request.chat_template_kwargs or {}, ends)

    def tokens(self, prompt: str | Sequence[int]) -> list[int]:
        """The ids of a prompt. Raises ApiError for ids that the model does not have and for none."""
        if isinstance(prompt, str):
            prompt.encode()  # raises UnicodeEncodeError for what no tokenizer takes, each in words of its own
            prompt = self.tokenizer(prompt)["input_ids"]
        ids = list(prompt)
        wrong = next((token for token in ids if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            raise ApiError(400, f"token {wrong} is none of the model's {self._vocabulary}", param="prompt")
        if not ids:
            raise ApiError(400, "the prompt is empty", param="prompt")
        return list(ids)

    def chat_tokens(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), keywords: dict[str, Any] | None = None,
        ends: str = "opened",
    ) -> list[int]:  # fmt: skip
        """By the model's chat template. ends: "opened", with what opens the answer; "continued", within the
        last message; "closed". keywords: the template's own arguments. Raises ApiError where there is no
        template, and for what of it is not the client's to set.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise unprocessable(f"{self.model_name} has no chat template; use /v1/completions", "messages")
        reserved = sorted(set(keywords or ()) & self._template_words)
        if reserved:  # a template of the client's own is a program that may run for hours
            raise unsupported(f"chat_template_kwargs.{reserved[0]}")
        plain = [message.plain() for message in messages]
        spelled = [tool.model_dump(exclude_none=True) for tool in tools] or None
        ending = {"add_generation_prompt": ends == "opened", "continue_final_message": ends == "continued"}
        text = rendered(self.tokenizer, plain, spelled, **ending, **(keywords or {}))
        text.encode()
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def enforced(self, asks: Sequence[Ask]) -> list[Ask]:
        """The same, with what keeps their answers or calls to a schema: of Grammars, which takes time, and
        raises what it does.
        """

        def matcher(ask: Ask) -> Matcher:
            if ask.constrained:
                return self.grammars.json(ask.schema, "tools" if ask.forced_tool else "response_format")
            functions = [tool.function for tool in cast(ChatRequest, ask.request).tools]
            told = [(f.name, f.parameters if f.strict else None) for f in functions]
            return self.grammars.calls(told, ask.reasoning)

        return [dataclasses.replace(ask, matcher=matcher(ask)) if ask.kept else ask for ask in asks]

    def jobs(self, ask: Ask, salt: bytes, tell: Any) -> list[Job]:
        """One for each answer. ask: enforced. tell: (index of the answer, event), from the loop's thread."""
        request, cache = ask.request, ask.request.cache
        salt = self.salted(salt, cache)
        out = []
        for index in range(request.n):
            seed = None if ask.sampling.seed is None else ask.sampling.seed + index
            sampling = Sampling(**{**ask.sampling.__dict__, "seed": seed})
            matcher = None if ask.matcher is None else ask.matcher.fresh()
            special = ask.tools and not ask.constrained  # <tool_call> is a special token of some models
            goes_on = getattr(request, "continue_final_message", True)  # a completion, too
            out.append(
                Job(
                    ask.prompt, ask.new_tokens, Sampler(sampling, ask.prompt, matcher),
                    Text(self.tokenizer, request.stop or (), special, ask.prompt if goes_on else ()),
                    lambda event, index=index: tell(index, event),
                    ends=frozenset() if request.ignore_eos else self._ends, salt=salt,
                    read=cache.read, write=cache.write,
                    prompt_logprobs=ask.sampling.logprobs if ask.echo else None,
                    windowing=ask.windowing, codec=request.kv_codec, inside=request.repair != "none",
                    priority=cache.priority, ttl_s=cache.ttl_s,
                )
            )  # fmt: skip
        return out

    def check_answers(self, asks: Sequence[Ask]) -> None:
        """Raises ApiError (400) for more answers than there is ever room for, which no 429 may say."""
        wanted, most = sum(ask.request.n for ask in asks), self.loop.limits.max_queue
        if wanted > most:
            text = f"{wanted} answers are asked for at once; this server takes {most}"
            raise ApiError(400, text, param="n")

    def held(self, ask: Ask, salt: bytes) -> dict[str, int]:
        """What of a prompt is in the store, before anything is computed."""
        request = ask.request
        held = self.loop.stored(ask.prompt, self.salted(salt, request.cache), request.kv_codec)
        return {"prompt_tokens": len(ask.prompt), "held_tokens": held}

    def salted(self, salt: bytes, cache: CacheOptions) -> bytes:
        """The salt of a request: the key's, with what the request adds."""
        return hashlib.sha256(salt + b"\0" + cache.salt.encode()).digest() if cache.salt else salt

    def _ask(
        self, prompt: list[int], wanted: int | None, sampling: Sampling, request: Common, **more: Any
    ) -> Ask:
        window = more.get("windowing")
        most = self.max_tokens if window is None else max(self.max_tokens, MOST_POSITIONS)
        room, least = most - len(prompt), 1 if wanted is None else wanted
        param = "prompt" if isinstance(request, CompletionRequest) else "messages"
        if room < least:
            raise too_long(len(prompt), least, most, param)
        if window is None and len(prompt) + least > self.loop.limits.memory_tokens:
            raise too_large(len(prompt), least, self.loop.limits.memory_tokens, param)
        new_tokens = wanted
        if new_tokens is None:
            held = self.loop.limits.memory_tokens - len(prompt) if window is None else room
            new_tokens = min(DEFAULT_NEW_TOKENS, room, held)
        if window is not None and window.most_tokens > self.max_tokens:
            text = f"the window holds up to {window.most_tokens} tokens; the limit is {self.max_tokens}"
            raise ApiError(400, text, param="window")
        return Ask(prompt, new_tokens, sampling, request, **more)

    def _sampling(self, request: Common, logprobs: int | None) -> Sampling:
        if request.repair not in (None, "none", self.repair):
            raise unsupported(f"repair {request.repair}", f"this server has {self.repair}, or none", "repair")
        bias = request.logit_bias or {}
        wrong = next((token for token in bias if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            text = f"logit_bias of token {wrong}; the model has {self._vocabulary}"
            raise ApiError(400, text, param="logit_bias")
        names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
                 "repetition_penalty", "seed")  # fmt: skip
        return Sampling(**{n: getattr(request, n) for n in names}, logit_bias=bias, logprobs=logprobs)

    def _format(self, request: ChatRequest) -> dict[str, Any] | None:
        asked = request.response_format
        if asked is None or asked.type != "json_schema":
            return None
        if asked.json_schema is None or asked.json_schema.schema_ is None:
            raise ApiError(400, "response_format json_schema without a schema", param="response_format")
        return asked.json_schema.schema_


def tool_schema(tools: Sequence[Any], choice: Any) -> dict[str, Any]:
    """The JSON that a call of one of these tools is. Raises ApiError for a tool that is none of these."""
    wanted = choice.function.name if isinstance(choice, NamedTool) else None
    functions = [tool.function for tool in tools if wanted in (None, tool.function.name)]
    if not functions:
        raise ApiError(400, f"tool_choice names {wanted!r}, which is none of the tools", param="tool_choice")
    try:
        return call_schema([(f.name, f.parameters) for f in functions])
    except RecursionError:
        raise ApiError(400, "the parameters of a tool are nested too deep", param="tools") from None
