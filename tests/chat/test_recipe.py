"""Prompts and answers against deepseek-recipe, DeepSeek's own library: the oracle of this package (about 10 s)."""

from __future__ import annotations

import json
import random
import string
from typing import Any

import pytest

from cedar.chat.effort import effort_number
from cedar.chat.encode import Conversation, Message, Special, Tool, ToolCall, parse_messages, parse_tools, render
from cedar.chat.encode import encode as encode_ours
from cedar.chat.encode import to_text as text_of
from cedar.chat.parse import Answer, AnswerReader, ChatParser
from cedar.chat.tokenizer import DSML, END_THINK, IMAGE, Tokenizer

recipe = pytest.importorskip("deepseek_recipe", reason="deepseek-recipe is not installed: pip install 'cedar-lm[test]'")

NUM_CONVERSATIONS = 10_000
NUM_ANSWERS = 10_000
# what a user may write and what must stay text, next to what breaks a naive encoder
WORDS = (
    "fox", "Room 12", "ΑΣ", "東京", "🦊", "é", "\n", "\n\n", " ", "", '"', "\\", "<b>", "</tool_result>", "<think>",
    END_THINK, "<｜User｜>", DSML, f"<{DSML} calls>", "1e5", "[DONE]", "null", "\t", "json",
)  # fmt: skip
NAMES = ("look", "get_weather", "x-y", "a.b")
EFFORTS = {50: "low", 75: "high", 100: "max"}


def words(rng: random.Random, most: int = 4) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(0, most)))


def json_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 2 else 6)
    if kind == 6:
        return [json_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 7:
        return {rng.choice(string.ascii_letters): json_value(rng, depth + 1) for _ in range(rng.randrange(3))}
    return (words(rng), rng.randint(-(2**53), 2**53), rng.choice((1.5, -0.25, 1e5, 3.0)), True, None, False)[kind]


def arguments(rng: random.Random) -> str:
    if rng.random() < 0.1:
        return rng.choice(("", "{bad", "5", "[1]", "null"))
    values = {rng.choice(("k", "city", "a b", "ü")): json_value(rng) for _ in range(rng.randrange(4))}
    return json.dumps(values, ensure_ascii=rng.random() < 0.5)


def tool(rng: random.Random, name: str) -> Tool:
    parameters = {"type": "object", "properties": {"k": {"type": "string", "description": words(rng)}}}
    return Tool(
        name=name,
        description=rng.choice(("", words(rng))),
        parameters=rng.choice((None, parameters, {**parameters, "required": ["k"]})),
    )


def conversation(rng: random.Random) -> Conversation:
    """Messages in any order, tool results in any order and place, with or without tools, thoughts and a format."""
    messages: list[Message] = []
    call_ids: list[str] = []
    for _ in range(rng.randint(1, 7)):
        role = rng.choice(("system", "user", "user", "assistant", "assistant", "tool", "tool", "reminder"))
        if role == "assistant":
            made = [ToolCall(id=f"c{len(call_ids) + i}", name=rng.choice(NAMES), arguments=arguments(rng))
                    for i in range(rng.choice((0, 0, 1, 2, 3)))]  # fmt: skip
            call_ids = [call.id for call in made] or call_ids
            messages.append(
                Message(role="assistant", content=words(rng), reasoning=rng.choice(("", f"I think {words(rng)}")),
                        tool_calls=tuple(made))
            )  # fmt: skip
        elif role == "tool":
            if call_ids:
                messages.append(Message(role="tool", content=words(rng), tool_call_id=rng.choice(call_ids)))
        else:
            messages.append(Message(role=role, content=words(rng)))
    if not messages:
        messages.append(Message(role="user", content=words(rng)))
    tools = tuple(tool(rng, name) for name in rng.sample(NAMES, rng.choice((0, 0, 1, 3))))
    # an answer with nothing before it is continued without its thoughts there, with them here
    may_continue = len(messages) > 1 and messages[-1].role == "assistant" and not messages[-1].tool_calls
    continues = not tools and may_continue and rng.random() < 0.5
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    return Conversation(
        messages=tuple(messages),
        tools=tools,
        thinking=rng.random() < 0.6,
        effort=rng.choice(tuple(EFFORTS)),
        response_format=rng.choice((None, None, {"type": "json_object"}, schema)),
        continue_last=continues,
    )


def theirs(asked: Conversation) -> Any:
    messages: list[Any] = []
    for i, message in enumerate(asked.messages):
        content = message.content
        assert isinstance(content, str)
        if message.role == "system":
            messages.append(recipe.SystemMessage(content))
        elif message.role == "user":
            messages.append(recipe.UserMessage(content))
        elif message.role == "tool":
            messages.append(recipe.ToolMessage(content, message.tool_call_id))
        elif message.role == "reminder":
            messages.append(recipe.LatestReminderMessage(content))
        else:
            calls = [recipe.ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls]
            prefix = asked.continue_last and i == len(asked.messages) - 1
            messages.append(recipe.AssistantMessage(content, message.reasoning or None, calls or None, prefix))
    form: dict[str, Any] = {}
    if asked.response_format == {"type": "json_object"}:
        form["response_format"] = "json_object"
    elif asked.response_format is not None:
        form["response_schema"] = dict(asked.response_format)
    return recipe.Conversation(
        messages,
        thinking_mode=asked.thinking,
        tools=[recipe.ToolDefinition(t.name, t.description or None, t.parameters or {}) for t in asked.tools] or None,
        reasoning_effort=EFFORTS[asked.effort],
        **form,
    )


@pytest.fixture(scope="module")
def encoding(release: Tokenizer) -> Any:
    special = recipe.SpecialTokens(image=IMAGE)
    tokenizer = recipe.Tokenizer.from_str(release.json_text)
    return recipe.DeepseekV41Encoding().with_special_tokens(special).with_tokenizer(tokenizer)


def test_prompts(encoding: Any, release: Tokenizer) -> None:
    rng = random.Random(41)
    for number in range(NUM_CONVERSATIONS):
        asked = conversation(rng)
        other = theirs(asked)
        assert text_of(render(asked)) == encoding.render_conversation(other).prompt, (number, asked)
        if number % 4 == 0:
            assert encode_ours(asked, release) == encoding.encode(other), (number, asked)


def request_body(rng: random.Random) -> dict[str, Any]:
    """What a client sends: rounds of a question, calls, all their results in any order, and an answer."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": words(rng)}] if rng.random() < 0.6 else []
    num_calls = 0
    with_tools = rng.random() < 0.6
    for _ in range(rng.randint(1, 3)):
        parts = [{"type": "text", "text": words(rng)} for _ in range(rng.randint(1, 3))]
        messages.append({"role": "user", "content": parts if rng.random() < 0.3 else words(rng)})
        answer: dict[str, Any] = {"role": "assistant", "content": words(rng) or "ok"}
        if rng.random() < 0.5:
            answer["reasoning_content"] = f"I think {words(rng)}"
        if with_tools and rng.random() < 0.7:
            calls = [
                {"id": f"c{num_calls + i}", "type": "function",
                 "function": {"name": rng.choice(NAMES[:3]), "arguments": arguments(rng)}}
                for i in range(rng.randint(1, 3))
            ]  # fmt: skip
            num_calls += len(calls)
            messages.append(answer | {"tool_calls": calls})
            rng.shuffle(calls)
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": words(rng)} for call in calls]
            answer = {"role": "assistant", "content": words(rng) or "done"}
        messages.append(answer)
    messages.append({"role": "user", "content": words(rng) or "and"})
    body: dict[str, Any] = {"model": "DeepSeek-V4.1-Flash", "messages": messages}
    if with_tools:
        offered = [tool(rng, name) for name in NAMES[:3]]
        body["tools"] = [
            {"type": "function", "function": {"name": t.name} | ({"parameters": t.parameters} if t.parameters else {})
             | ({"description": t.description} if t.description else {})}
            for t in offered
        ]  # fmt: skip
    thinking = rng.choice((None, "enabled", "disabled"))
    if thinking:
        body["thinking"] = {"type": thinking}
    if thinking != "disabled" and rng.random() < 0.5:
        body["reasoning_effort"] = rng.choice(("low", "medium", "high", "xhigh", "max"))
    return body


def test_request_bodies(encoding: Any) -> None:
    rng = random.Random(42)
    options = recipe.ConversionOptions().with_special_tokens(recipe.SpecialTokens(image=IMAGE))
    for number in range(1_000):
        body = request_body(rng)
        want = recipe.ChatCompletionRequest(body).convert(options).conversation
        effort = effort_number(body.get("reasoning_effort", 75))
        assert effort is not None
        asked = Conversation(
            messages=parse_messages(body["messages"]),
            tools=parse_tools(body.get("tools", [])),
            thinking=body.get("thinking") != {"type": "disabled"},
            effort=effort,
        )
        assert text_of(render(asked)) == encoding.render_conversation(want).prompt, (number, body)


def test_images_stand_where_they_were(encoding: Any) -> None:
    image = recipe.UrlImageSource("https://example.org/a.png")
    for thinking in (False, True):
        asked = Conversation(
            messages=(Message(role="user", content=("What is in", Special(IMAGE), "this?")),), thinking=thinking
        )
        other = recipe.Conversation(
            [recipe.UserMessage(f"What is in\n\n{IMAGE}\n\nthis?", [image], image_token=IMAGE)], thinking_mode=thinking
        )
        assert text_of(render(asked)) == encoding.render_conversation(other).prompt


OPEN = f"<{DSML}"
INVOKES = (f'{OPEN} invoke name="f">\n', f'{OPEN}invoke name="g">\n')
# of a mark
BEGINNINGS = ("<", "</", "<｜DS")
FRAGMENTS = (
    "\n", "\n\n", "a fox", END_THINK, "<think>", OPEN, f"{OPEN} calls>\n", *INVOKES,
    f'{OPEN} parameter name="k" string="true">', f'{OPEN} parameter name="n" string="false">', "5", '{"a": [1]}',
    f"</{DSML} parameter>\n", f"</{DSML} invoke>\n", f"</{DSML} calls>", "END", "E", '"', "\\", *BEGINNINGS, "é🦊",
    "x<y>", f"{OPEN}tool_calls>\n", f'{OPEN}parameter name="k" string="true">',
    f"</{DSML}parameter>\n", f"</{DSML}invoke>\n", f"</{DSML}tool_calls>",
)  # fmt: skip


def their_answer(text: str, *, thinking: bool, stop: list[str]) -> tuple[str, str, list[tuple[str, str]], bool]:
    request = recipe.ConversationRequest(recipe.Conversation([]), recipe.ModelVersion.DeepseekV41Flash)
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "id", "m")
    stage = recipe.ThinkingInitialStage.ReasoningStart if thinking else None
    options = recipe.ParsingOptions(parse_tool_calls=True, thinking_initial_stage=stage, stop_sequences=stop)
    processor = recipe.StreamProcessor(generator, options)
    reasoning = content = ""
    calls: list[list[str]] = []
    reason = ""
    chunks = processor.push(recipe.InferenceChunk.text(text, 1))
    if not processor.finished:
        chunks += processor.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
        chunks += processor.finish()
    for chunk in chunks:
        for choice in json.loads(chunk.to_json())["choices"]:
            delta = choice["delta"]
            reasoning += delta.get("reasoning_content") or ""
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                if call.get("id"):
                    calls.append([function["name"], ""])
                calls[call["index"]][1] += function.get("arguments") or ""
            reason = choice.get("finish_reason") or reason
    return reasoning, content, [(name, said) for name, said in calls], reason == "tool_calls"


def completion(rng: random.Random) -> str:
    """Markup in any order, but for the three places where ours knows better (the next test)."""
    text = ""
    for _ in range(rng.randint(1, 12)):
        fragment = rng.choice(FRAGMENTS)
        if fragment in INVOKES and any(invoke in text for invoke in INVOKES):
            text += f"</{DSML} parameter>\n</{DSML} invoke>\n"
        if text.endswith(BEGINNINGS) and fragment.startswith("\n"):
            text += "."
        text += fragment
    return text + ("." if text.endswith(BEGINNINGS) and any(invoke in text for invoke in INVOKES) else "")


def test_where_ours_differs() -> None:
    def both(text: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        parser, answer = ChatParser(thinking=False), Answer()
        answer.add(parser.push(text) + parser.finish())
        return [(call.name, call.arguments) for call in answer.calls], their_answer(text, thinking=False, stop=[])[2]

    # a call that begins inside another one is recovered (field report C01)
    inner = f"{INVOKES[0]}{INVOKES[1]}</{DSML}invoke>\n</{DSML} calls>"
    assert both(inner) == ([("f", "{}"), ("g", "{}")], [("f", "{}")])
    # half a closing tag is no part of a value (field report C04)
    half = f'{INVOKES[0]}{OPEN} parameter name="k" string="true">Paris</'
    assert both(half) == ([("f", '{"k": "Paris')], [("f", '{"k": "Paris</')])
    # line ends before a mark are no text, also behind what looked like the beginning of a mark
    parser = ChatParser(thinking=True)
    (delta,) = parser.push(f"a <\n\n{END_THINK}")
    assert (delta.reasoning, their_answer(f"a <\n\n{END_THINK}", thinking=True, stop=[])[0]) == ("a <", "a <\n")


def test_answers(release: Tokenizer) -> None:
    rng = random.Random(43)
    num_calls = 0
    for number in range(NUM_ANSWERS):
        text = completion(rng)
        thinking, stop = rng.random() < 0.5, rng.choice(([], [], ["END"], ["E"]))
        want = their_answer(text, thinking=thinking, stop=stop)
        parser, answer = ChatParser(thinking=thinking, stop=stop), Answer()
        for piece in rng.choice(((text,), tuple(text))):
            answer.add(parser.push(piece))
        answer.add(parser.finish())
        made = [(call.name, call.arguments) for call in answer.calls]
        assert (answer.reasoning, answer.content, made, bool(made)) == want, (number, text, thinking, stop)
        num_calls += len(made)
        if number % 10 == 0:
            # token by token, marks as the tokens they are
            reader, by_token = AnswerReader(release, ChatParser(thinking=thinking, stop=stop)), Answer()
            for token_id in marked_ids(text, release):
                by_token.add(reader.push(token_id))
            by_token.add(reader.finish())
            assert (by_token.reasoning, by_token.content) == (answer.reasoning, answer.content)
    assert num_calls > NUM_ANSWERS // 4


def marked_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = []
    for i, part in enumerate(text.split(DSML)):
        ids += [tokenizer.special[DSML]] if i else []
        for j, piece in enumerate(part.split(END_THINK)):
            ids += ([tokenizer.special[END_THINK]] if j else []) + tokenizer.encode(piece)
    return ids
