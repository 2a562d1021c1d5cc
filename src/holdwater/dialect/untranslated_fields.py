"""The fields that a server of another dialect cannot get: refused, or left out where that is harmless.

Each dialect has its rules here, one for each field; `docs/translation.md` shows them as a table. The rules do
not cover fields that no dialect knows: `pick_extensions` returns these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from .message import as_dict, as_list, as_string

Object = dict[str, Any]
_CAPITAL = re.compile(r"[A-Z]")


class FieldRule(NamedTuple):
    """A field that cannot be translated."""

    field: str  # its path: `tools[].type`
    refused: bool = False  # False: it is left out
    applies: Callable[[Any], bool] = bool  # whether the rule is about this value
    at: str = ""  # the path of that value, if it is not the field's; left out is then this whole value
    servers: tuple[str, ...] = ()  # the dialects of the servers that cannot get it; empty: all


class PathNode:
    """A place in a request, and the rules about the value there."""

    def __init__(self) -> None:
        self.rules: list[FieldRule] = []
        self.fields: dict[str, PathNode] = {}
        self.items: PathNode | None = None

    def find_rules(self, value: Any, found: list[FieldRule]) -> None:
        """Add the rules that `value` meets, and remove the items of lists that are left out."""
        for rule in self.rules:
            if rule.applies(value):
                found.append(rule)
        if isinstance(value, dict):
            for name, node in self.fields.items():
                if (inner := value.get(name)) is not None:
                    node.find_rules(inner, found)
        elif self.items is not None and isinstance(value, list):
            self._check_items(value, self.items, found)

    def _check_items(self, items: list[Any], node: PathNode, found: list[FieldRule]) -> None:
        removed: list[int] = []
        for place, item in enumerate(items):
            before = len(found)
            node.find_rules(item, found)
            met = found[before:] if len(found) > before else ()
            if any(not rule.refused and rule in node.rules for rule in met):
                removed.append(place)
        for place in reversed(removed):
            del items[place]


def find_untranslated(request: Object, rules: tuple[FieldRule, ...], server: str) -> list[FieldRule]:
    """Return the rules that `request` meets, and remove the items of its lists that are left out."""
    found: list[FieldRule] = []
    _make_tree(rules, server).find_rules(request, found)
    return found


def pick_extensions(fields: Mapping[str, Any], known: frozenset[str], rules: tuple[FieldRule, ...]) -> Object:
    """Return the fields that neither `known` nor a rule has, such as the options of one server."""
    taken = _list_names(known, rules)
    return {name: value for name, value in fields.items() if name not in taken}


@lru_cache(maxsize=32)
def _list_names(known: frozenset[str], rules: tuple[FieldRule, ...]) -> frozenset[str]:
    names = known | {re.split(r"[.\[]", rule.field)[0] for rule in rules}
    return names | {_to_snake(name) for name in names}


@lru_cache(maxsize=32)
def _make_tree(rules: tuple[FieldRule, ...], server: str) -> PathNode:
    tree = PathNode()
    for rule in rules:
        if rule.servers and server not in rule.servers:
            continue
        node = tree
        for step in (rule.at or rule.field).split("."):
            name = step.removesuffix("[]")
            node = node.fields.setdefault(name, PathNode())
            if name != step:
                node.items = node.items or PathNode()
                node = node.items
        node.rules.append(rule)
    _accept_snake_case(tree)
    return tree


def _accept_snake_case(node: PathNode) -> None:
    """Let each name have either form: Google accepts both."""
    for name, inner in tuple(node.fields.items()):
        _accept_snake_case(inner)
        node.fields.setdefault(_to_snake(name), inner)
    if node.items is not None:
        _accept_snake_case(node.items)


def _to_snake(name: str) -> str:
    return _CAPITAL.sub(lambda match: f"_{match[0].lower()}", name)


def is_hosted(tool: Any) -> bool:
    """Return whether only the provider knows the tool: it runs the tool, or has its definition."""
    return as_dict(tool).get("type") not in (None, "function", "custom") and "input_schema" not in tool


def _leave_out(*fields: str, servers: tuple[str, ...] = ()) -> tuple[FieldRule, ...]:
    return tuple(FieldRule(field, servers=servers) for field in fields)


def _refuse(*fields: str) -> tuple[FieldRule, ...]:
    return tuple(FieldRule(field, refused=True) for field in fields)


def _is_many(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _has_other(word: str) -> Callable[[Any], bool]:
    return lambda values: any(as_string(value).lower() != word for value in as_list(values))


# Chat Completions; the server has Messages

CHAT_RULES = (
    FieldRule("n", refused=True, applies=_is_many),
    FieldRule("modalities", refused=True, applies=_has_other("text")),
    FieldRule("response_format.type", refused=True, applies=lambda kind: kind == "json_object"),
    *_refuse("functions", "logit_bias", "logprobs", "messages[].audio.id"),
    *_refuse("messages[].content[].file.file_id", "tools[].custom"),
    *_leave_out("audio", "frequency_penalty", "metadata", "prediction", "presence_penalty"),
    *_leave_out("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "seed", "service_tier"),
    *_leave_out("store", "top_logprobs", "user", "verbosity", "web_search_options"),
)
CHAT_KNOWN = frozenset(
    {"model", "messages", "tools", "tool_choice", "parallel_tool_calls", "stop", "stream", "stream_options"}
    | {"max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "reasoning_effort"}
)

# Responses

_HOSTED_ITEMS = frozenset(
    {"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_call"}
    | {"mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "compaction"}
)


def _is_reference(item: Any) -> bool:
    if not isinstance(item, dict) or not item.keys() <= {"id", "type"}:
        return False
    return item.get("type") in (None, "item_reference")


RESPONSES_RULES = (
    *_refuse("background", "input[].content[].file_id", "input[].output[].file_id"),
    *_refuse("previous_response_id", "prompt"),  # the former if the record does not have the reply
    FieldRule("input[].id", refused=True, applies=_is_reference, at="input[]"),
    FieldRule(
        "text.format.type", refused=True, applies=lambda kind: kind == "json_object", servers=("messages",)
    ),
    FieldRule("tools[].type", applies=is_hosted, at="tools[]"),
    FieldRule("input[].type", applies=lambda item: as_dict(item).get("type") in _HOSTED_ITEMS, at="input[]"),
    *_leave_out("client_metadata", "context_management", "include", "input[].encrypted_content"),
    *_leave_out("max_tool_calls", "metadata", "prompt_cache_key", "prompt_cache_retention"),
    *_leave_out("reasoning.summary", "safety_identifier", "service_tier", "store", "text.verbosity"),
    *_leave_out("top_logprobs", "truncation"),
    *_leave_out("user", servers=("messages",)),
)
RESPONSES_KNOWN = frozenset(
    {"model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "stream"}
    | {"stream_options", "max_output_tokens", "temperature", "top_p", "text", "reasoning"}
    | {"conversation"}
)

# Messages

_SERVER_BLOCKS = frozenset({"redacted_thinking", "server_tool_use", "mcp_tool_use"})


def _is_server_block(block: Any) -> bool:
    """Return whether a block is hidden, or a tool call that the provider made, or its result."""
    kind = as_string(as_dict(block).get("type"))
    return kind in _SERVER_BLOCKS or (kind.endswith("_tool_result") and kind != "tool_result")


MESSAGES_RULES = (
    *_refuse("container", "mcp_servers", "messages[].content[].source.file_id"),
    *_refuse("messages[].content[].content[].source.file_id"),
    FieldRule("tools[].type", applies=is_hosted, at="tools[]"),
    FieldRule("messages[].content[].type", applies=_is_server_block, at="messages[].content[]"),
    *_leave_out("cache_control", "context_management", "inference_geo", "messages[].content[].cache_control"),
    *_leave_out("messages[].content[].citations", "messages[].content[].content[].cache_control"),
    *_leave_out("metadata", "service_tier", "speed", "system[].cache_control", "thinking"),
    *_leave_out("tools[].cache_control"),
)
MESSAGES_KNOWN = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "max_tokens", "temperature", "top_p", "top_k"}
    | {"stream", "stop_sequences", "output_config"}
)

# Gemini

_FILE_STORES = ("https://generativelanguage.googleapis.com/", "gs://")


def _is_json_without_schema(config: Any) -> bool:
    given = {_to_snake(name): value for name, value in as_dict(config).items()}
    schema = given.get("response_schema") or given.get("response_json_schema")
    return given.get("response_mime_type") == "application/json" and not schema


def _leave_out_part(name: str) -> FieldRule:
    """Leave out the parts that have this field."""
    names = {name, _to_snake(name)}
    path = "contents[].parts[]"
    return FieldRule(f"{path}.{name}", applies=lambda part: not names.isdisjoint(as_dict(part)), at=path)


GEMINI_RULES = (
    FieldRule("cachedContent", refused=True),
    FieldRule(
        "contents[].parts[].fileData.fileUri",
        refused=True,
        applies=lambda uri: as_string(uri).startswith(_FILE_STORES),
    ),
    FieldRule("generationConfig.candidateCount", refused=True, applies=_is_many),
    FieldRule("generationConfig.responseModalities", refused=True, applies=_has_other("text")),
    FieldRule(
        "generationConfig.responseMimeType",
        refused=True,
        applies=_is_json_without_schema,
        at="generationConfig",
        servers=("messages",),
    ),
    FieldRule(
        "toolConfig.functionCallingConfig.allowedFunctionNames",
        refused=True,
        applies=lambda names: len(as_list(names)) > 1,
    ),
    FieldRule(
        "tools[]",
        applies=lambda tool: not as_dict(tool).keys() & {"functionDeclarations", "function_declarations"},
    ),
    _leave_out_part("codeExecutionResult"),
    _leave_out_part("executableCode"),
    *_leave_out("contents[].parts[].thoughtSignature", "contents[].parts[].videoMetadata"),
    *_leave_out("generationConfig.enableEnhancedCivicAnswers", "generationConfig.logprobs"),
    *_leave_out("generationConfig.mediaResolution", "generationConfig.responseLogprobs"),
    *_leave_out("generationConfig.speechConfig", "generationConfig.thinkingConfig"),
    *_leave_out("generationConfig.frequencyPenalty", servers=("messages",)),
    *_leave_out("generationConfig.presencePenalty", "generationConfig.seed", servers=("messages",)),
    *_leave_out("labels", "safetySettings", "serviceTier", "store", "toolConfig.retrievalConfig"),
)
GEMINI_KNOWN = frozenset(
    {"model", "contents", "systemInstruction", "tools", "toolConfig", "generationConfig", "stream"}
)
GEMINI_CONFIG = frozenset(
    {"temperature", "topP", "topK", "maxOutputTokens", "stopSequences", "seed", "presencePenalty"}
    | {"frequencyPenalty", "candidateCount", "responseSchema", "responseJsonSchema", "responseMimeType"}
    | {"enableEnhancedCivicAnswers", "logprobs", "mediaResolution", "responseLogprobs", "responseModalities"}
    | {"speechConfig", "thinkingConfig"}
)
