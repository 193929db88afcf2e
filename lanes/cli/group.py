"""Groups and commands whose help shows a value as one word, and whose error texts name the command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, Final, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from lanes.cli.misuse import Misuse

Function = TypeVar("Function", bound=Callable[..., Any])

_WITHOUT_BRACES: Final = str.maketrans("", "", "{}")
"""Translation that removes the braces in which some versions of typer write a required argument."""


class Command(TyperCommand):
    """A command whose help shows an argument by its metavar, without the Python type of the argument."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.translate(_WITHOUT_BRACES) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for kind in ("argument", "option"):
            rows = [
                (str(param.metavar) if kind == "argument" else record[0], record[1])
                for param in self.get_params(ctx)
                if param.param_type_name == kind and (record := param.get_help_record(ctx)) is not None
            ]
            if rows:
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an option without a value. The parser would take the next option for the value."""
        params = self.get_params(ctx)
        options: dict[str, Any] = {
            name: each for each in params if each.param_type_name == "option" for name in each.opts
        }
        names = {*options, *ctx.help_option_names}
        words = args[: args.index("--")] if "--" in args else args
        for word, value in zip_longest(words, words[1:]):
            option = options.get(word)
            if option is None or option.is_flag or not (value is None or value in names):
                continue
            error = Misuse(f"has {word} without a value; write {word} {option.metavar or 'VALUE'}")
            error.ctx = ctx
            raise error
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Misuse as error:
            error.ctx = ctx
            raise


class WithDefault(TyperGroup):
    """A group whose command ``default`` runs if the first word names no command of the group."""

    default = ""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


class RingGroup(WithDefault):
    """The group ``lanes ring``. ``lanes ring KEY…`` shows the slot, partition and lane of each key."""

    default = "slot"


def show_help(context: typer.Context) -> None:
    # The callback of a group runs before its command. The docstring would become part of the help.
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


class Group(typer.Typer):
    """A group whose commands are ``Command`` objects."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **options: Any
    ) -> Callable[[Function], Function]:
        add = super().command(name, cls=cls or Command, **options)

        def register(function: Function) -> Function:
            add(_with_options(function))
            return function

        return register


def _with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace each parameter that is a ``NamedTuple`` by its fields, so that commands can share options."""
    hints = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        kind = hints[parameter.name]
        each = {parameter.name: (kind, parameter.default)}
        if fields := getattr(kind, "_fields", ()):
            groups[parameter.name] = kind
            kinds = get_type_hints(kind, include_extras=True)
            each = {name: (kinds[name], kind._field_defaults[name]) for name in fields}
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)
            for name, (hint, default) in each.items()
        ]

    @functools.wraps(function)
    def run(**given: Any) -> Any:
        for name, kind in groups.items():
            given[name] = kind(**{field: given.pop(field) for field in kind._fields})
        return function(**given)

    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run
