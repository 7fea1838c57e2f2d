"""Messages to the text that a chat model was trained on, by the model's own template.

A template is a Jinja program from a file that anyone may have written, so it runs in Jinja's sandbox, sees
plain values only, and has a budget of steps and a bound on the numbers it may hand on.
"""

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000
"""What one rendering may take: a round of a loop is one step. Real templates take some hundred a message,
and this many take a few seconds."""

CALL_STEPS = 10
"""What a call counts; it takes longer than a round, a macro's up to fifty times."""

MAX_REPEATED = 1_000_000
"""Length of what `*` may make of a text or list, and the largest whole number that a filter or a call may be
given: of rounds, of columns, of digits. Larger ones can take minutes and gigabytes."""

MAX_POWER = 64
"""Base and exponent of `**`; larger ones can take minutes and gigabytes."""


class ChatTokenizer(Protocol):
    """What a chat needs of a tokenizer."""

    @property
    def chat_template(self) -> str | None:
        """Jinja source, or None."""
        ...

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Special tokens by role ("bos_token", "eos_token")."""
        ...

    def encode_marked(self, text: str, /) -> list[int]:
        """Returns the ids of a text that writes its special tokens itself."""
        ...


def encode_chat(messages: Sequence[Mapping[str, Any]], tokenizer: ChatTokenizer | None) -> list[int]:
    """Returns the ids of a chat, up to where the model's answer begins.

    A special token that is written out in a message is taken for one, as in the template itself.

    Args:
        messages: see `render_chat`.
        tokenizer: of the model.

    Raises:
        ValueError: there is no tokenizer or template, or as `render_chat`.
    """
    if tokenizer is None:
        raise ValueError("chat: this model has no tokenizer; use generate with token ids")
    if tokenizer.chat_template is None:
        raise ValueError(
            "chat: this model has no chat template (chat_template.jinja, chat_template in "
            "tokenizer_config.json, or tokenizer.chat_template in a GGUF file): it may not be a chat model; "
            "use generate with a text"
        )
    return tokenizer.encode_marked(render_chat(tokenizer.chat_template, messages, tokenizer.named_tokens))


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], named_tokens: Mapping[str, str]) -> str:
    """Writes messages as one text, up to where the model's answer begins.

    Args:
        template: Jinja source, as transformers' `apply_chat_template` takes it.
        messages: objects with the texts "role" (most templates know "system", "user" and "assistant") and
            "content", in order; what else JSON can express is passed to the template.
        named_tokens: "bos_token", "eos_token" and others, to their text.

    Raises:
        ValueError: messages of another form, or a template that is broken, refuses them, or wants more than
            it may have; with the template's own words.
    """
    environment = _Environment()
    try:
        program = environment.from_string(environment.counted(template))
        return program.render(
            messages=_plain(messages), tools=None, documents=None, add_generation_prompt=True, **named_tokens
        )
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
    except _BadMessages as error:
        raise ValueError(str(error)) from error
    except Exception as error:  # A template is a program: it can raise whatever Python's operators do.
        raise ValueError(f"chat template: {error or type(error).__name__}") from error


class _BadMessages(Exception):
    """The caller's fault, not the template's."""


def _plain(messages: Any) -> list[dict[str, Any]]:
    """The messages as JSON makes them: of Python's own types, with no methods that the sandbox knows not."""
    if not isinstance(messages, list | tuple) or not messages:
        raise _BadMessages(f"messages: expected a list of at least one message, got {messages!r}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _BadMessages(
                f'messages[{index}]: expected {{"role": ..., "content": ...}}, got {message!r}'
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = repr(message[key]) if key in message else "no such key"
                raise _BadMessages(f"messages[{index}]: {key}: expected a text, got {found}")
    try:
        return [json.loads(json.dumps(dict(message))) for message in messages]
    except (TypeError, ValueError, RecursionError) as error:
        raise _BadMessages(f"messages: expected what JSON can express: {error}") from error


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja as templates of chats expect it, with a budget; for one rendering."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.steps_left = MAX_STEPS
        self.filters |= {"tojson": _to_json, _COUNTED: self._count_rounds}
        self.filters = {name: _with_small_numbers(fn) for name, fn in self.filters.items()}
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now}

    def counted(self, source: str) -> nodes.Template:
        """The template's program, with each loop over what `_count_rounds` lets through."""
        program = self.parse(source)
        for loop in program.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return program

    def take(self, steps: int) -> None:
        """Takes steps from the budget."""
        self.steps_left -= steps
        if self.steps_left < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS:,} steps")

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call of a template goes through here."""
        self.take(CALL_STEPS)
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        _check_small(getattr(method, "__self__", None), *args, *kwargs.values())
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Every `*`, `**` and `%` of a template goes through here."""
        if operator == "%":
            if isinstance(left, str):
                _check_small(left, *(right if isinstance(right, tuple) else (right,)))
            return super().call_binop(context, operator, left, right)
        sizes = [x if isinstance(x, int | float) else len(x) for x in (left, right)]
        numbers = all(isinstance(x, int | float) for x in (left, right))
        if (operator == "**" and max(map(abs, sizes)) > MAX_POWER) or (
            operator == "*" and not numbers and sizes[0] * sizes[1] > MAX_REPEATED
        ):
            raise SecurityError(f"{sizes[0]} {operator} {sizes[1]} is too much")
        return super().call_binop(context, operator, left, right)

    def _count_rounds(self, items: Any) -> Any:
        for item in items:
            self.take(1)
            yield item


def _check_small(*values: Any) -> None:
    """Refuses numbers, and texts that are formats with numbers, of which Python would make huge texts."""
    for value in values:
        is_large = isinstance(value, int) and abs(value) > MAX_REPEATED
        if is_large or (isinstance(value, str) and _LARGE_WIDTH.search(value)):
            raise SecurityError(f"{str(value)[:40]} is too large a number to be given on")


_LARGE_WIDTH = re.compile(r"[%{][^%{}]*\d{7}")
"""A number of seven digits within a format's field."""


def _with_small_numbers(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, which refuses large numbers beside the value that it filters."""
    first = 2 if hasattr(fn, "jinja_pass_arg") else 1  # some get the context before the value

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_small(*args[first:], *kwargs.values())
        if fn is do_format:
            _check_small(*args)
        return fn(*args, **kwargs)

    return checked


_COUNTED = "pjax counted"
"""The filter's name; with a space in it, no template can write it."""


class _Generation(Extension):
    """`{% generation %}`, by which templates mark the model's own words for training; nothing here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Leaves only what is between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers does it; Jinja's own would write `<` as HTML wants it."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
