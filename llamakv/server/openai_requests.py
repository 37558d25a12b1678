"""Requests as OpenAI's clients send them, read into an ``Ask``: checked field by field, and refused by name."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from llamakv.engine.json_schema import any_object_grammar, schema_grammar
from llamakv.records import Sampling
from llamakv.server.contract import Ask, ChatMessage, ServedModel
from llamakv.server.errors_http import HttpError
from llamakv.server.fields import Fields, as_number, refuse
from llamakv.server.limits import ServeOptions

_T = TypeVar("_T")

_HARMLESS = (
    "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention",
    "prediction", "parallel_tool_calls",
)  # fmt: skip
"""What changes nothing about an answer, or only how fast it comes."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_N_STOPS_MAX = 16
_N_STOP_CHARACTERS_MAX = 1000
_N_BIASES_MAX = 1024
_N_GRAMMAR_CHARACTERS_MAX = 1 << 16
_N_TOP_LOGPROBS_MAX = 20
_N_USER_CHARACTERS = 64
N_TOLD_MAX = 50_000
"""Tokens with their probabilities, chosen ones and others, that an answer tells at most if it is not streamed: it is
put together all at once, which takes about 700 bytes for each, and a third of a second in which nobody else is told
anything."""

_N_COMPLETION_TOKENS = 16
"""What OpenAI writes at most where a completion does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A request that was read. ``echo`` is put before each choice; ``includes_usage`` is about streams."""

    ask: Ask
    is_stream: bool
    includes_usage: bool
    echo: str = ""


def read_chat(values: Mapping[str, object], model: ServedModel, options: ServeOptions, space: str) -> TextRequest:
    """Read the body of ``/v1/chat/completions``.

    Raises:
        HttpError: 400 with the field's name, or 404 for another model.
        UsageError: a JSON schema that cannot be followed.
    """
    fields = Fields(values)
    check_model(fields.take("model"), model, options)
    _refuse_tools(fields)
    messages = _messages(fields)
    wants_logprobs, n_top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, _N_TOP_LOGPROBS_MAX)
    if n_top is not None and not wants_logprobs:
        raise refuse("top_logprobs", "'top_logprobs' needs 'logprobs' to be true")
    n_long = fields.integer("max_completion_tokens", 1, 1 << 31)
    if fields.take("modalities") not in (None, ["text"]):
        raise refuse("modalities", "only text is written: 'modalities' must be ['text']")
    return _read(fields, model, options, space, messages, (n_top or 0) if wants_logprobs else None, n_long)


def read_completion(values: Mapping[str, object], model: ServedModel, options: ServeOptions, space: str) -> TextRequest:
    """Read the body of ``/v1/completions``. Raises: as ``read_chat``."""
    fields = Fields(values)
    check_model(fields.take("model"), model, options)
    prompt = _prompt(fields.take("prompt"), model)
    n_top = fields.integer("logprobs", 0, _N_TOP_LOGPROBS_MAX)
    echo = ""
    if fields.flag("echo"):
        if n_top is not None or not isinstance(prompt, str):
            raise refuse("echo", "'echo' is done for a prompt of text without 'logprobs' only")
        echo = prompt
    best_of = fields.integer("best_of", 1, options.max_choices)
    if fields.take("suffix") not in (None, ""):
        raise refuse("suffix", "'suffix' is not supported by this server", code="unsupported_parameter")
    request = _read(fields, model, options, space, prompt, n_top, None, n_default=_N_COMPLETION_TOKENS)
    if best_of is not None and best_of != request.ask.n_choices:
        raise refuse("best_of", "'best_of' other than 'n' is not supported by this server")
    return replace(request, echo=echo)


def check_model(name: object, model: ServedModel, options: ServeOptions) -> None:
    """Refuse a name that is not the served model's; none at all, or an empty one, means it too.

    Raises:
        HttpError: 404.
    """
    if name not in (None, "", model.name, *options.model_alias):
        told = name[:100] if isinstance(name, str) else "that"
        raise HttpError(
            404, f"the model '{told}' is not served here, '{model.name}' is", code="model_not_found", param="model"
        )


def _read(
    fields: Fields,
    model: ServedModel,
    options: ServeOptions,
    space: str,
    prompt: tuple[ChatMessage, ...] | str | tuple[int, ...],
    n_top: int | None,
    n_long: int | None,
    *,
    n_default: int | None = None,
) -> TextRequest:
    """What both kinds have in common."""
    n_short = fields.integer("max_tokens", 1, 1 << 31)
    if n_short is not None and n_long is not None and n_short != n_long:
        raise refuse("max_tokens", "'max_tokens' and 'max_completion_tokens' differ")
    n_tokens = n_long if n_short is None else n_short
    if options.max_tokens is not None and n_tokens is not None and n_tokens > options.max_tokens:
        raise refuse("max_tokens", f"'max_tokens' must be {options.max_tokens} at most, not {n_tokens}")
    default = min((n for n in (n_default, options.max_tokens) if n is not None), default=None)
    is_stream = fields.flag("stream")
    n_choices = fields.integer("n", 1, options.max_choices) or 1
    if n_top is not None and not is_stream:
        n_told_most = N_TOLD_MAX // (n_choices * (n_top + 1))
        _check_told(n_tokens, n_told_most, model, n_choices, n_top)
        default = n_told_most if default is None else min(default, n_told_most)
    request = TextRequest(
        ask=Ask(
            prompt=prompt,
            sampling=_sampling(fields, model, options, default if n_tokens is None else n_tokens),
            n_choices=n_choices,
            n_top_logprobs=n_top,
            space=space,
            session=fields.text("session", 200),
            timeout_s=fields.number("timeout_s", 0, options.max_time_s, is_open=True) or options.max_time_s,
            user=_user(fields),
        ),
        is_stream=is_stream,
        includes_usage=_includes_usage(fields, is_stream),
    )
    for name in _HARMLESS:
        fields.take(name)
    fields.close()
    return request


def _user(fields: Fields) -> str:
    """Whom the client asks for: only the beginning of a long name counts, and nothing is refused for it."""
    given = [fields.take(name) for name in ("safety_identifier", "user")]
    return next((one[:_N_USER_CHARACTERS] for one in given if isinstance(one, str) and one), "")


def _check_told(n_tokens: int | None, n_most: int, model: ServedModel, n_choices: int, n_top: int) -> None:
    n_tokens = None if n_tokens is None else min(n_tokens, model.n_ctx_max)
    if n_tokens is not None and n_tokens > n_most:
        raise refuse(
            "max_tokens",
            f"'n' {n_choices} with {n_tokens} tokens each, and {n_top} others told for each of them, are "
            f"{n_choices * n_tokens * (n_top + 1)} log probabilities; without 'stream' {N_TOLD_MAX} are told at most",
        )


def _sampling(fields: Fields, model: ServedModel, options: ServeOptions, n_tokens: int | None) -> Sampling:
    base = options.sampling
    seed = fields.integer("seed", -(1 << 63), (1 << 64) - 1)
    return replace(
        base,
        temperature=_or(fields.number("temperature", 0, 2), base.temperature),
        top_p=_or(fields.number("top_p", 0, 1), base.top_p),
        min_p=_or(fields.number("min_p", 0, 1), base.min_p),
        top_k=_or(fields.integer("top_k", 0, 1 << 31), base.top_k),
        repeat_penalty=_or(fields.number("repeat_penalty", 0, 10, is_open=True), base.repeat_penalty),
        presence_penalty=_or(fields.number("presence_penalty", -2, 2), base.presence_penalty),
        frequency_penalty=_or(fields.number("frequency_penalty", -2, 2), base.frequency_penalty),
        seed=secrets.randbits(32) if seed is None else seed & 0xFFFFFFFF,
        logit_bias=_logit_bias(fields, model.n_vocab),
        grammar=_grammar(fields),
        max_tokens=n_tokens,
        stop=_stops(fields.take("stop")),
    )


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _includes_usage(fields: Fields, is_stream: bool) -> bool:
    given = fields.mapping("stream_options")
    if given is None:
        return False
    if not is_stream:
        raise refuse("stream_options", "'stream_options' needs 'stream' to be true")
    inner = Fields(given)
    includes = inner.flag("include_usage")
    inner.take("include_obfuscation")
    inner.close("stream_options.")
    return includes


def _refuse_tools(fields: Fields) -> None:
    for name in ("tools", "functions"):
        if fields.take(name) not in (None, []):
            raise refuse(name, "tools and functions are not supported by this server", code="unsupported_parameter")
    for name in ("tool_choice", "function_call"):
        if fields.take(name) not in (None, "none", "auto"):
            raise refuse(name, "tools and functions are not supported by this server", code="unsupported_parameter")


def _messages(fields: Fields) -> tuple[ChatMessage, ...]:
    messages = fields.array("messages")
    if not messages:
        raise refuse(
            "messages", "'messages' must be an array of one message at least", code="missing_required_parameter"
        )
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(values: object, at: str) -> ChatMessage:
    if not isinstance(values, dict):
        raise refuse(at, f"'{at}' must be an object", code="invalid_type")
    fields = Fields(values)
    role = fields.take("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise refuse(f"{at}.role", f"'{at}.role' must be one of {', '.join(_ROLES)}")
    for name in ("tool_calls", "function_call", "audio"):
        if fields.take(name) not in (None, []):
            raise refuse(f"{at}.{name}", f"'{at}.{name}' is not supported by this server", code="unsupported_parameter")
    for name in ("name", "tool_call_id", "refusal", "annotations"):
        fields.take(name)
    content = _content(fields.take("content"), f"{at}.content")
    fields.close(f"{at}.")
    return ChatMessage(role=_ROLES[role], content=content)


def _content(value: object, at: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse(at, f"'{at}' must be a string or an array of text parts", code="invalid_type")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = f"'{kind[:40]}'" if isinstance(kind, str) else "that"
            raise refuse(f"{at}[{i}]", f"'{at}[{i}]' is {shown}: only parts of type 'text' are supported")
        text = part.get("text")
        if not isinstance(text, str):
            raise refuse(f"{at}[{i}].text", f"'{at}[{i}].text' must be a string", code="invalid_type")
        texts.append(text)
    return "".join(texts)


def _prompt(value: object, model: ServedModel) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if value is None or value in ("", []):
        raise refuse("prompt", "'prompt' must be text or token ids, and not empty", code="missing_required_parameter")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse("prompt", "'prompt' must be a string or an array of token ids", code="invalid_type")
    if any(isinstance(one, str | list) for one in value):
        raise refuse("prompt", "one prompt a request is supported, 'prompt' holds several")
    tokens = []
    for token in value:
        if type(token) is not int or not 0 <= token < model.n_vocab:
            raise refuse("prompt", f"token ids in 'prompt' must be whole numbers of 0 to {model.n_vocab - 1}")
        tokens.append(token)
    return tuple(tokens)


def _stops(value: object) -> tuple[str, ...]:
    stops = [] if value is None else value if isinstance(value, list) else [value]
    told = f"'stop' must be a string or up to {_N_STOPS_MAX} of them, of 1 to {_N_STOP_CHARACTERS_MAX} characters each"
    if len(stops) > _N_STOPS_MAX:
        raise refuse("stop", told)
    texts = []
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= _N_STOP_CHARACTERS_MAX:
            raise refuse("stop", told)
        texts.append(stop)
    return tuple(texts)


def _logit_bias(fields: Fields, n_vocab: int) -> tuple[tuple[int, float], ...]:
    given = fields.mapping("logit_bias") or {}
    if len(given) > _N_BIASES_MAX:
        raise refuse("logit_bias", f"'logit_bias' must name {_N_BIASES_MAX} tokens at most, not {len(given)}")
    biases: dict[int, float] = {}
    for name, value in given.items():
        is_id = name.isascii() and name.isdigit() and len(name) < 10 and int(name) < n_vocab
        bias = as_number(value)
        if not is_id or bias is None or not -100 <= bias <= 100:
            raise refuse("logit_bias", f"'logit_bias' must map token ids below {n_vocab} to numbers of -100 to 100")
        biases[int(name)] = bias
    return tuple(biases.items())


def _grammar(fields: Fields) -> str | None:
    grammar = fields.text("grammar", _N_GRAMMAR_CHARACTERS_MAX)
    if grammar is not None and ("\0" in grammar or not grammar.strip()):
        raise refuse("grammar", "'grammar' must be GBNF with a rule named root")
    form = fields.mapping("response_format")
    if form is None:
        return grammar
    inner = Fields(form)
    kind = inner.take("type")
    if kind == "text":
        inner.close("response_format.")
        return grammar
    if grammar is not None:
        raise refuse("grammar", "'grammar' and 'response_format' exclude each other")
    if kind == "json_object":
        schema = inner.mapping("schema")  # as llama.cpp's own server has it
        inner.close("response_format.")
        return any_object_grammar() if schema is None else schema_grammar(schema)
    if kind != "json_schema":
        raise refuse("response_format.type", "'response_format.type' must be text, json_object or json_schema")
    named = Fields(inner.mapping("json_schema") or {})
    inner.close("response_format.")
    schema = named.mapping("schema")
    if schema is None:
        raise refuse("response_format.json_schema.schema", "'response_format.json_schema.schema' must be an object")
    for name in ("name", "description", "strict"):
        named.take(name)
    named.close("response_format.json_schema.")
    return schema_grammar(schema)
