"""Messages -> the pieces of a prompt -> token ids. The server, `LLM` and fine-tuning all render here.

A prompt is a list of pieces: plain text, and special tokens by name. Only the second kind becomes special
ids, so nothing a user writes can open a turn, end one, or call a tool.

Source: engram-dspark-vision-chat.md 5.2 to 5.5.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cedar.chat.effort import DEFAULT_EFFORT, effort_line
from cedar.chat.tokenizer import ASSISTANT, BOS, DSML, END_THINK, EOS, IMAGE, REMINDER, SYSTEM, THINK, USER, Tokenizer
from cedar.errors import RequestError

Role = Literal["system", "user", "assistant", "tool", "reminder"]

# a model that opens a turn by itself has finished its own: these end an answer
END_OF_ANSWER = (EOS, BOS, SYSTEM, USER, ASSISTANT)

# the next two are protocol constants of deepseek-recipe (MIT licence, Copyright DeepSeek): the model was
# trained on them byte for byte, so they are kept as they are
_TOOLS_HEAD = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜ calls>" block like the following:

<｜DSML｜ calls>
<｜DSML｜ invoke name="$TOOL_NAME">
<｜DSML｜ parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜ parameter>
...
</｜DSML｜ invoke>
<｜DSML｜ invoke name="$TOOL_NAME2">
...
</｜DSML｜ invoke>
</｜DSML｜ calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""  # noqa: E501
_TOOLS_TAIL = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_FORMAT_HEAD = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


@dataclass(frozen=True, slots=True)
class Special:
    """A special token, by name."""

    name: str


Piece = str | Special


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call of an earlier assistant turn; `arguments` is JSON text, as clients send it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message.

    Attributes:
        content: Text, or texts and image placeholders (`Special(IMAGE)`) in order.
        reasoning: What an assistant turn thought; shown again only while tools are offered.
        tool_call_id: Which call a tool message answers.
    """

    role: Role
    content: str | tuple[Piece, ...] = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A function the model may call; `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Everything that decides a prompt.

    Attributes:
        response_format: What the answer must look like: `{"type": "json_object"}`, or a bare JSON schema.
        continue_last: The last message is an assistant's and is to be continued, not answered.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool = True
    effort: int = DEFAULT_EFFORT
    response_format: Mapping[str, Any] | None = None
    continue_last: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """An earlier assistant turn, between the token that opens it and the one that ends it.

    Attributes:
        message: What the client sent of it.
        thinks: It shows its reasoning, between marks of its own.
        pieces: How it is written out if nobody remembers the tokens it was made of.
    """

    message: Message
    thinks: bool
    pieces: tuple[Piece, ...]


# (ids of the prompt up to the turn, the turn) -> the ids it was generated as, None if nobody remembers
Recall = Callable[[Sequence[int], Turn], Sequence[int] | None]


def render(conversation: Conversation, *, generation_header: bool = True) -> list[Piece]:
    """The prompt of a conversation, up to where the model goes on.

    Args:
        generation_header: False leaves out the mark that opens the next assistant turn (fine-tuning).

    Raises:
        RequestError: `continue_last` without an assistant message at the end, or together with tools.
    """
    pieces: list[Piece] = []
    for piece in _prompt(conversation, generation_header=generation_header):
        pieces += piece.pieces if isinstance(piece, Turn) else (piece,)
    return pieces


def _prompt(conversation: Conversation, *, generation_header: bool = True) -> list[Piece | Turn]:
    """`render` with every assistant turn of the history still in one."""
    messages = _merged(conversation)
    thinking, tools = conversation.thinking, conversation.tools
    continued = None
    if conversation.continue_last:
        if tools or not messages or messages[-1].role != "assistant":
            raise RequestError(
                "only a last assistant message can be continued, and not while tools are offered", param="messages"
            )
        continued = messages.pop()

    pieces: list[Piece | Turn] = [Special(BOS)]
    if thinking:
        pieces += [Special(SYSTEM), effort_line(conversation.effort)]
    latest_calls: tuple[ToolCall, ...] = ()
    position = 0
    while position < len(messages):
        message = messages[position]
        if message.role in ("user", "tool"):
            stop = position
            while stop < len(messages) and messages[stop].role in ("user", "tool"):
                stop += 1
            pieces += [Special(USER), *_user_turn(messages[position:stop], latest_calls)]
            position = stop
            continue
        if message.role == "system":
            if position > 0 or not thinking:
                pieces.append(Special(SYSTEM))
            pieces += _joined(message.content)
            if position == 0:
                pieces += _system_appendix(conversation)
        elif message.role == "reminder":
            pieces += [Special(REMINDER), *_joined(message.content)]
        else:
            latest_calls = message.tool_calls or latest_calls
            thinks = thinking and bool(tools)
            thought = (Special(THINK), _spoken(message.reasoning)) if thinks else ()
            written = (*thought, Special(END_THINK), *_joined(message.content), *_calls(message.tool_calls))
            pieces += [Special(ASSISTANT), Turn(message=message, thinks=thinks, pieces=written), Special(EOS)]
        position += 1

    if continued is not None:
        pieces += [Special(ASSISTANT), *_opened(continued, thinking=thinking)]
    elif generation_header:
        pieces += [Special(ASSISTANT), Special(THINK if thinking else END_THINK)]
    return pieces


def to_ids(pieces: Iterable[Piece], tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt: runs of text by plain encoding, special tokens by name between them.

    Raises:
        RequestError: The tokenizer has no token of a name that the prompt needs.
    """
    ids: list[int] = []
    run: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            run.append(piece)
            continue
        if piece.name not in tokenizer.special:
            raise RequestError(f"this model's tokenizer has no token {piece.name!r}", param="messages")
        ids += tokenizer.encode("".join(run))
        ids.append(tokenizer.special[piece.name])
        run.clear()
    return ids + tokenizer.encode("".join(run))


def to_text(pieces: Iterable[Piece]) -> str:
    """The prompt as one string, special tokens by name: for people and for logs, not for encoding."""
    return "".join(piece if isinstance(piece, str) else piece.name for piece in pieces)


def encode(conversation: Conversation, tokenizer: Tokenizer, recall: Recall | None = None) -> list[int]:
    """Token ids of the prompt of a conversation; see `render` and `to_ids`.

    Args:
        recall: Asked for each assistant turn of the history: a turn that comes back spelled otherwise than it
            was generated can have its own ids (`cedar.cache.turns`).
    """
    if recall is None:
        return to_ids(render(conversation), tokenizer)
    ids: list[int] = []
    run: list[Piece] = []
    for piece in _prompt(conversation):
        if not isinstance(piece, Turn):
            run.append(piece)
            continue
        # a turn stands between special tokens, so what is around it encodes the same without it
        ids += to_ids(run, tokenizer)
        own = recall(ids, piece)
        ids += to_ids(piece.pieces, tokenizer) if own is None else own
        run = []
    return ids + to_ids(run, tokenizer)


def dumps(value: object) -> str:
    """JSON as it stands in prompts: `", "` and `": "`, keys in their order, letters unescaped."""
    return json.dumps(value, ensure_ascii=False)


def _merged(conversation: Conversation) -> list[Message]:
    """The messages with an empty system message in front where one is needed, and no run of reminders."""
    messages = list(conversation.messages)
    needs_system = bool(conversation.tools) or conversation.response_format is not None
    if needs_system and (not messages or messages[0].role != "system"):
        messages.insert(0, Message(role="system"))
    return [
        message
        for i, message in enumerate(messages)
        if not (message.role == "reminder" and i > 0 and messages[i - 1].role == "reminder")
    ]


def _joined(content: str | tuple[Piece, ...]) -> list[Piece]:
    if isinstance(content, str):
        return [content]
    pieces: list[Piece] = []
    for i, piece in enumerate(content):
        pieces += ["\n\n", piece] if i else [piece]
    return pieces


def _system_appendix(conversation: Conversation) -> list[Piece]:
    pieces: list[Piece] = []
    if conversation.tools:
        schemas = [
            dumps({"name": tool.name, "description": tool.description, "parameters": tool.parameters or {}})
            for tool in conversation.tools
        ]
        pieces += ["\n\n", *_marked(_TOOLS_HEAD), "\n".join(schemas), _TOOLS_TAIL]
    if conversation.response_format is not None:
        pieces += [_FORMAT_HEAD, dumps(conversation.response_format)]
    return pieces


def _marked(text: str) -> list[Piece]:
    """The tools text as pieces: the marks it explains stand in it as the tokens themselves."""
    parts = re.split(f"({DSML}|{THINK}|{END_THINK})", text)
    return [Special(part) if i % 2 else part for i, part in enumerate(parts)]


def _user_turn(messages: Sequence[Message], calls: tuple[ToolCall, ...]) -> list[Piece]:
    """User texts in place; tool results in the order of the calls they answer, in the slots of results."""
    order = {call.id: i for i, call in reversed(list(enumerate(calls)))}
    results = [message for message in messages if message.role == "tool"]
    # a result whose call is unknown ranks with the first, as in the official encoder
    results.sort(key=lambda message: order.get(message.tool_call_id, 0))
    pieces: list[Piece] = []
    for i, message in enumerate(messages):
        if i:
            pieces.append("\n\n")
        if message.role == "tool":
            pieces += ["<tool_result>", *_joined(results.pop(0).content), "</tool_result>"]
        else:
            pieces += _joined(message.content)
    return pieces


def _spoken(reasoning: str) -> str:
    # clients fill a missing thought with a blank, and a model that reads one answers inside its thinking
    return reasoning if reasoning.strip() else ""


def _opened(message: Message, *, thinking: bool) -> list[Piece]:
    """An assistant turn that the model is to continue: no end, no new mark."""
    if not thinking:
        return [Special(END_THINK), *_joined(message.content)]
    thought: list[Piece] = [Special(THINK), _spoken(message.reasoning)]
    return [*thought, Special(END_THINK), *_joined(message.content)] if message.content else thought


def _calls(calls: Sequence[ToolCall]) -> list[Piece]:
    if not calls:
        return []
    dsml = Special(DSML)
    pieces: list[Piece] = ["\n\n<", dsml, " calls>\n"]
    for call in calls:
        pieces += ["<", dsml, f' invoke name="{call.name}">\n']
        for i, (key, value) in enumerate(_arguments(call.arguments).items()):
            is_text = isinstance(value, str)
            pieces += ["\n"] if i else []
            pieces += ["<", dsml, f' parameter name="{key}" string="{"true" if is_text else "false"}">']
            pieces += [value if is_text else dumps(value), "</", dsml, " parameter>"]
        pieces += ["\n</", dsml, " invoke>\n"]
    return [*pieces, "</", dsml, " calls>"]


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def parse_messages(raw: object, *, param: str = "messages", images: bool = True) -> tuple[Message, ...]:
    """Messages of the OpenAI shape, checked.

    `developer` counts as system; content may be text, null or a list of parts; an assistant's thoughts are
    read from `reasoning_content` or `reasoning`. A system message that says nothing is left out.

    Args:
        images: Whether the model can see.

    Raises:
        RequestError: Empty, a message that cannot be understood, or an image for a model that cannot see; `param`
            names it down to the part.
    """
    if not isinstance(raw, Sequence) or isinstance(raw, (str, bytes)):
        raise _bad(param, f"a {type(raw).__name__}", "a list of messages")
    if not raw:
        raise RequestError("messages is empty; send at least one message", param=param, code="invalid_messages")
    messages: list[Message] = []
    known_calls: set[str] = set()
    for i, item in enumerate(raw):
        message = _parse_message(item, f"{param}[{i}]")
        for call in message.tool_calls:
            if call.id in known_calls:
                raise RequestError(
                    f"the call id {call.id!r} is used twice; give every tool call its own id",
                    param=f"{param}[{i}].tool_calls",
                    code="invalid_messages",
                )
            known_calls.add(call.id)
        if message.role == "tool" and message.tool_call_id not in known_calls:
            raise RequestError(
                f"{param}[{i}] answers the call {message.tool_call_id!r}, which no earlier assistant message made; "
                "send that message too, or drop this one",
                param=f"{param}[{i}].tool_call_id",
                code="invalid_messages",
            )
        if not images and not isinstance(message.content, str) and Special(IMAGE) in message.content:
            raise RequestError(
                "images are not enabled: this model has no vision tower; send text only",
                param=f"{param}[{i}].content[{message.content.index(Special(IMAGE))}]",
                code="invalid_image",
            )
        messages.append(message)
    kept = [message for message in messages if message.role != "system" or any(message.content)]
    return tuple(kept or messages)


_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "latest_reminder": "reminder",
}


def _bad(param: str, got: str, expected: str) -> RequestError:
    return RequestError(f"{param} is {got}, expected {expected}", param=param)


def _text(item: Mapping[str, Any], key: str, param: str) -> str:
    value = item.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _bad(f"{param}.{key}", f"a {type(value).__name__}", "a string")
    return value


def _parse_message(item: object, param: str) -> Message:
    if not isinstance(item, Mapping):
        raise _bad(param, f"a {type(item).__name__}", "an object with role and content")
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _bad(f"{param}.role", repr(role), f"one of {', '.join(_ROLES)}")
    message = Message(role=_ROLES[role], content=_parse_content(item.get("content"), f"{param}.content"))
    if message.role == "assistant":
        calls = item.get("tool_calls") or ()
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise _bad(f"{param}.tool_calls", f"a {type(calls).__name__}", "a list of calls")
        return replace(
            message,
            reasoning=_text(item, "reasoning_content", param) or _text(item, "reasoning", param),
            tool_calls=tuple(_parse_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(calls)),
        )
    if message.content == "" and item.get("content") is None:
        raise _bad(f"{param}.content", "missing", "text, or a list of parts")
    if message.role == "tool":
        return replace(message, tool_call_id=_text(item, "tool_call_id", param))
    return message


def _parse_content(content: object, param: str) -> str | tuple[Piece, ...]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _bad(param, f"a {type(content).__name__}", "a string or a list of parts")
    pieces: list[Piece] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and kind in ("text", "input_text", "output_text"):
            if not isinstance(part.get("text"), str):
                raise _bad(f"{param}[{i}].text", repr(part.get("text")), "a string")
            pieces.append(part["text"])
        elif kind in ("image_url", "input_image"):
            pieces.append(Special(IMAGE))
        else:
            raise _bad(f"{param}[{i}]", f"a part of type {kind!r}", "a part of type text or image_url")
    return tuple(pieces)


def _parse_call(call: object, param: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _bad(param, "no function call", "an object with id and function {name, arguments}")
    name = _text(function, "name", f"{param}.function")
    if not name:
        raise _bad(f"{param}.function.name", "empty", "the name of a function")
    arguments = function.get("arguments")
    # some clients send the object itself where the protocol has its text
    text = dumps(arguments) if isinstance(arguments, Mapping) else _text(function, "arguments", f"{param}.function")
    return ToolCall(id=_text(call, "id", param), name=name, arguments=text)


def parse_tools(raw: object, *, param: str = "tools") -> tuple[Tool, ...]:
    """Tools of the OpenAI shape, `[{"type": "function", "function": {...}}]`.

    Raises:
        RequestError: Not a list of function tools; `param` names the entry.
    """
    if not isinstance(raw, Sequence) or isinstance(raw, (str, bytes)):
        raise _bad(param, f"a {type(raw).__name__}", "a list of tools")
    tools = []
    for i, item in enumerate(raw):
        function = item.get("function") if isinstance(item, Mapping) else None
        if not isinstance(item, Mapping) or item.get("type") != "function" or not isinstance(function, Mapping):
            raise _bad(f"{param}[{i}]", "no function tool", 'an object {"type": "function", "function": {...}}')
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise RequestError(
                f"{param}[{i}].function.parameters is a {type(parameters).__name__}, expected a JSON schema object",
                param=f"{param}[{i}].function.parameters",
                code="invalid_schema",
            )
        name = _text(function, "name", f"{param}[{i}].function")
        if not name:
            raise _bad(f"{param}[{i}].function.name", "empty", "the name of a function")
        description = _text(function, "description", f"{param}[{i}].function")
        tools.append(Tool(name=name, description=description, parameters=parameters))
    return tuple(tools)
