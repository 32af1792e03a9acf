"""What an answer must look like -> which tokens may come next (llguidance does the work).

Three cases. A response format: the answer is JSON of a schema. A forced tool choice: the answer is a block of
calls to the offered functions. Tools that the model may use: nothing is constrained until it opens a block, and
from there on the block is well formed. With thinking on, the first two begin after the reasoning has been closed,
and the reasoning can neither end the answer nor open a block.

Strings of a call stand raw between their tags, so of their schema only `enum`, `const`, `minLength` and `maxLength`
are enforced; every other value is JSON of its schema, as far as llguidance knows its keywords.

Source: engram-dspark-vision-chat.md 5.3, 5.6; serving.md 6.2.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import msgspec

from cedar.chat.encode import Tool
from cedar.chat.tokenizer import BOS, DSML, END_THINK, EOS, Tokenizer
from cedar.errors import RequestError

log = logging.getLogger(__name__)

MAX_SCHEMA_BYTES = 256 * 2**10

# one spelling of white space: a model cannot lose itself in spaces, and it writes what it was trained on
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ALL_KINDS = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
# repetitions above this cost the compiler more than they are worth; such a length is not enforced
_LONGEST_COUNTED = 2000


class Grammars:
    """Makes the constraints of one tokenizer; its tables are built at the first use.

    Args:
        vocab_size: Length of the model's logits.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._tables: llguidance.LLTokenizer | None = None

    def of_schema(self, schema: Mapping[str, Any], *, thinking: bool, param: str) -> TokenConstraint:
        """An answer that is JSON of `schema`.

        Raises:
            RequestError: The schema is too large, or uses what cannot be compiled.
        """
        check_schema(schema, param)
        return self._begin(f"body: {_json(schema)}", thinking=thinking, param=param)

    def of_calls(self, tools: Sequence[Tool], *, thinking: bool, parallel: bool, param: str) -> TokenConstraint:
        """An answer that is one call, or with `parallel` at least one, to some of `tools`."""
        lark = f'body: "\\n\\n<" {self._dsml} block\n{self._block(tools, parallel=parallel)}'
        return self._begin(lark, thinking=thinking, param=param)

    def of_schema_or_calls(
        self, schema: Mapping[str, Any], tools: Sequence[Tool], *, thinking: bool, parallel: bool, param: str
    ) -> TokenConstraint:
        """An answer that is JSON of `schema`, or calls."""
        check_schema(schema, param)
        lark = f'body: format | "\\n\\n<" {self._dsml} block\nformat: {_json(schema)}\n'
        return self._begin(lark + self._block(tools, parallel=parallel), thinking=thinking, param=param)

    def of_optional_calls(self, tools: Sequence[Tool], *, parallel: bool, param: str) -> TokenConstraint | None:
        """Any answer, but once it opens a block of calls the block is well formed.

        None if that cannot be promised: agents bring schemas of everybody's making, and no call was asked for.
        """
        lark = f"start: block\n{self._block(tools, parallel=parallel)}"
        try:
            return self._compile(lark, param=param, trigger=self._tokenizer.special[DSML])
        except RequestError as error:
            log.info("calls are not constrained: %s", error)
            return None

    @property
    def _dsml(self) -> str:
        return f"<[{self._tokenizer.special[DSML]}]>"

    def _begin(self, lark: str, *, thinking: bool, param: str) -> TokenConstraint:
        if not thinking:
            return self._compile(f"start: body\n{lark}", param=param)
        end = f"<[{self._tokenizer.special[END_THINK]}]>"
        # the marks spelled in plain letters would end the reasoning for whoever reads the text
        marks = "|".join(mark.replace("/", r"\/") for mark in (END_THINK, f"<{DSML}"))
        think = f"THINK: /(?s:.+)/ & ~/(?s:.*)({marks})(?s:.*)/"
        return self._compile(f"start: THINK? {end} body\n{think}\n{lark}", param=param)

    # llguidance reads the longest word that fits, so no word may begin like another at the same place unless the
    # mark follows: a line end before "<" and the one before "</" belong to the words
    def _block(self, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Rules of a block of calls, after the mark that opens it."""
        more = f'("\\n<" {self._dsml} call)* ' if parallel else ""
        lines = [
            f'block: " calls>\\n<" {self._dsml} call {more}"\\n</" {self._dsml} " calls>"',
            f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}",
            r"RAW: /(?s:.*)<\//",
            r'NAME: /[^"\n]+/',
        ]
        for i, tool in enumerate(tools):
            head = _quoted(f' invoke name="{tool.name}">')
            lines += [
                f'call_{i}: {head} first_{i}_0 "\\n</" {self._dsml} " invoke>"',
                *self._parameters(i, tool),
            ]
        return "\n".join(lines)

    def _parameters(self, i: int, tool: Tool) -> list[str]:
        schema = tool.parameters or {}
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        if not isinstance(properties, Mapping) or isinstance(required, str) or not isinstance(required, Sequence):
            raise RequestError(
                f"the parameters of {tool.name!r} need an object of properties and a list of required names",
                param="tools",
                code="invalid_schema",
            )
        if not properties:
            return self._any_parameters(i, schema)
        lines = []
        count = len(properties)
        for k, (key, part) in enumerate(properties.items()):
            shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
            part = part if isinstance(part, Mapping) else {}
            skip = "" if key in required else f" | first_{i}_{k + 1}"
            more = "" if key in required else f" | more_{i}_{k + 1}"
            lines += [
                f'first_{i}_{k}: "\\n<" value_{i}_{k} more_{i}_{k + 1}{skip}',
                f'more_{i}_{k}: "\\n<" value_{i}_{k} more_{i}_{k + 1}{more}',
                *self._value(f"{i}_{k}", key, {**shared, **part}, schema),
            ]
        # a call without parameters has an empty line where they would stand
        return [*lines, f'first_{i}_{count}: "\\n"', f'more_{i}_{count}: ""']

    def _any_parameters(self, i: int, schema: Mapping[str, Any]) -> list[str]:
        # no names are known: a function without parameters, unless the schema says that anything goes
        if not schema.get("additionalProperties"):
            return [f'first_{i}_0: "\\n"']
        return [
            f'first_{i}_0: "\\n" | ("\\n<" value_{i})+',
            f'value_{i}: {self._dsml} " parameter name=\\"" NAME (raw_{i} | json_{i}) {self._dsml} " parameter>"',
            f'raw_{i}: "\\" string=\\"true\\">" RAW',
            f'json_{i}: "\\" string=\\"false\\">" any_{i} "</"',
            f"any_{i}: {_json({})}",
        ]

    def _value(self, name: str, key: str, part: Mapping[str, Any], root: Mapping[str, Any]) -> list[str]:
        """Rules `value_NAME` of one parameter: raw text, JSON, or either."""
        kinds = _kinds(part, root)
        head = f"{self._dsml} " + _quoted(f' parameter name="{key}" string=')
        tail = f'{self._dsml} " parameter>"'
        lines, forms = [], []
        if "string" in kinds:
            forms.append(f'"\\"true\\">" text_{name}')
            lines.append(f"text_{name}: {' | '.join(_raw(leaf) for leaf in _strings(part, root))}")
        if kinds - {"string"}:
            forms.append(f'"\\"false\\">" json_{name} "</"')
            lines.append(f"json_{name}: {_json(part, lenient=True)}")
        return [f"value_{name}: {head} ({' | '.join(forms)}) {tail}", *lines]

    def _compile(self, lark: str, *, param: str, trigger: int | None = None) -> TokenConstraint:
        tables = self._built()
        grammar = llguidance.LLMatcher.grammar_from_lark(lark)
        matcher = llguidance.LLMatcher(tables, grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().splitlines()[0]
            raise RequestError(
                f"{param} holds a schema that cannot be enforced ({reason}); simplify it", param=param,
                code="invalid_schema",
            )  # fmt: skip
        return TokenConstraint(matcher, trigger=trigger)

    def _built(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._tables is None:
                wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer))
                self._tables = llguidance.LLTokenizer(wrapper, n_vocab=self._vocab_size)
            return self._tables


class TokenConstraint:
    """Which tokens may come next in one answer; fulfils `cedar.engine.request.Constraint`.

    Args:
        trigger: Nothing is constrained before this token.
    """

    def __init__(self, matcher: llguidance.LLMatcher, *, trigger: int | None) -> None:
        self._matcher, self._trigger = matcher, trigger

    def allowed(self) -> bytes | None:
        """A bit for each token id, or None for all.

        Raises:
            ArithmeticError: The grammar grew beyond llguidance's limits.
        """
        if self._trigger is not None:
            return None
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise ArithmeticError(f"the answer's grammar failed: {self._matcher.get_error()}")
        return mask

    def accept(self, token_id: int) -> None:
        """This token came."""
        if self._trigger is None:
            self._matcher.consume_token(token_id)
        elif token_id == self._trigger:
            self._trigger = None


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.special[EOS], tokenizer.special[BOS]
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(len(tokenizer))]
        self.special_token_ids = sorted(tokenizer.special.values())

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", errors="replace"))


def check_schema(schema: object, param: str) -> None:
    """Refuse what is no schema, or too large a one.

    Raises:
        RequestError: `invalid_schema`.
    """
    if not isinstance(schema, Mapping):
        raise RequestError(
            f"{param} is a {type(schema).__name__}, expected a JSON schema object", param=param, code="invalid_schema"
        )
    size = len(msgspec.json.encode(schema))
    if size > MAX_SCHEMA_BYTES:
        raise RequestError(
            f"{param} has {size} bytes, expected at most {MAX_SCHEMA_BYTES}", param=param, code="invalid_schema"
        )


def _json(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """A rule's body; `lenient` leaves out what llguidance does not know instead of refusing it."""
    return "%json " + json.dumps({**schema, "x-guidance": {**_JSON_OPTIONS, "lenient": lenient}})


def _quoted(text: str) -> str:
    return json.dumps(text)


def _raw(part: Mapping[str, Any]) -> str:
    """A string between its tags, the `</` of the closing one included."""
    values = [part["const"]] if "const" in part else part.get("enum")
    if isinstance(values, list):
        return " | ".join(_quoted(f"{value}</") for value in values if isinstance(value, str))
    low, high = part.get("minLength", 0), part.get("maxLength")
    if not isinstance(low, int) or not isinstance(high, int | None):
        return "RAW"
    if low > _LONGEST_COUNTED or (high or 0) > _LONGEST_COUNTED or (low == 0 and high is None):
        return "RAW"
    return rf"/(?s:.{{{low},{'' if high is None else high}}})<\//"


def _strings(part: Mapping[str, Any], root: Mapping[str, Any], depth: int = 0) -> list[Mapping[str, Any]]:
    """The schemas of its strings, references and alternatives resolved."""
    for name in ("anyOf", "oneOf"):
        branches = part.get(name)
        if isinstance(branches, list) and depth < 8:
            able = [b for b in branches if isinstance(b, Mapping) and "string" in _kinds(b, root)]
            return [leaf for branch in able for leaf in _strings(branch, root, depth + 1)]
    return [_resolved(part, root)]


def _resolved(part: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    for _ in range(8):
        reference = part.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: Any = root
        for name in reference[2:].split("/"):
            target = target.get(name, {}) if isinstance(target, Mapping) else {}
        part = target if isinstance(target, Mapping) else {}
    return part


def _kinds(part: Mapping[str, Any], root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema admits, as far as it says so plainly."""
    part = _resolved(part, root)
    if "const" in part or isinstance(part.get("enum"), list):
        values = [part["const"]] if "const" in part else part["enum"]
        return frozenset("string" if isinstance(value, str) else "object" for value in values) or _ALL_KINDS
    kind = part.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(kind)
    for name in ("anyOf", "oneOf"):
        branches = part.get(name)
        if isinstance(branches, list) and branches and depth < 8:
            found = [_kinds(branch, root, depth + 1) for branch in branches if isinstance(branch, Mapping)]
            return frozenset[str]().union(*found)
    return _ALL_KINDS
