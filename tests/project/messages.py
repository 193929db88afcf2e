"""The list of every error and warning that the product can print.

``python -m tests.project.messages`` writes ``messages.txt`` in this folder. ``python -m tests.project.messages
compare``, a part of ``make check``, prints the differences; its exit status is then 1.

The program parses the sources and imports no module of the product. An error is listed under the function that makes
the error, even if another function raises it. A text may use a name of a local variable, of a constant, of a function
that returns texts, or of a parameter. For such a name, the program also lists the text behind the name. Any other
expression stays in the text as ``{expression}``.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from tests.project.public_api import ROOT, modules
from tests.project.source_names import (
    Function,
    Source,
    arguments,
    bound,
    called,
    calls,
    defined,
    fields_of,
    is_error,
    methods,
    parameters,
    source,
)

FILE: Final = ROOT / "tests" / "project" / "messages.txt"
HEAD: Final = """\
# Every error and warning that the product can print. `python -m tests.project.messages` writes this list, and
# tests/project/test_messages.py checks it. Under each module are its functions, and under each function its texts.
# {x} is the value of an expression, and «one text» if … else «another» is a choice. `name = …` below a text is the
# value of that name. `returns` marks a text for the function's callers, `for f(name)` a text that is passed to f.
# Read each text as if it arrived at 3 a.m.: the fault, its place, the value, the remedy.
"""
READ_IT: Final = (
    "Texts of the product have changed. Read each new text as if it arrived at 3 a.m.: the fault, its place (source, "
    "partition, position, file), the value, the remedy; no secret, no payload, and only the hash of a key. Then run "
    "`python -m tests.project.messages`.\
\
"
)
WIDTH: Final = 116

LEVELS: Final = {"warning": "WARNING", "error": "ERROR", "exception": "ERROR", "critical": "CRITICAL", "log": "LOG"}
LOGGERS: Final = ("log", "_log", "logger", "logging")
TEXTUAL: Final = ("join", "format", "get", "items", "values", "next", "str", "sorted", "list", "tuple", "rstrip")
"""Functions and methods of Python that combine texts."""

CLEANING: Final = ("printable", "printable_lines", "redacted", "error_text", "error_type")
"""Functions that return the text of their argument; the list shows the argument where the call is."""

ALSO: Final = (
    ("lanes_kafka.partitioners", "Census", "report"),
    ("lanes_spark.tables.journal", "", "doubts_of"),
)
"""Functions whose texts other modules print: (module, class or "", function)."""

COLLECTED: Final = (("lanes.observe.ownership", "OwnershipLog", "lost", "reason"),)
"""Parameters whose texts a later line prints from a collection: (module, class, function, parameter)."""

OF_PYTHON: Final = {*dir(str), *dir(list), *dir(dict)}
"""Methods of str, list and dict, which an unknown instance may have."""

OUTCOMES: Final = ("Check",)
"""Results of a doctor, which are listed like errors."""


class Told(NamedTuple):
    """One entry of the list: its function, its kind, its text, and the texts of its expressions."""

    where: str
    kind: str
    text: str
    filled: tuple[str, ...]


class Parameter(NamedTuple):
    """A parameter of a function, or of a class, whose callers pass texts."""

    module: str
    owner: str
    name: str


# --- one text


def prose(text: str) -> bool:
    """Whether a literal is for human readers: at least two words, or a part of a sentence."""
    return re.search(r"[A-Za-z…]['’,:;.]* +\S*[A-Za-z]", text) is not None or text.startswith((": ", ", ", "; "))


def parts(here: Source, node: ast.AST) -> Iterator[ast.AST]:
    """The parts of an expression that form its text. Arguments of calls that return no text are left out."""
    yield node
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        target = called(here, node)
        function = target[1] if target is not None and isinstance(target[1], Function) else None
        if name not in TEXTUAL and (function is None or not returns_text(function)):
            return
    for inner in ast.iter_child_nodes(node):
        yield from parts(here, inner)


def is_prose(here: Source, node: ast.expr) -> bool:
    """Whether an expression contains a text for human readers."""
    return any(isinstance(one, ast.Constant) and prose(str(one.value)) for one in parts(here, node))


def is_text(annotation: ast.expr | None) -> bool:
    """Whether an annotation means a text, or several texts."""
    words = set(re.findall(r"[A-Za-z_]+", ast.unparse(annotation))) if annotation is not None else set()
    return "str" in words and words.isdisjoint({"dict", "Mapping", "Callable", "bytes", "Any"})


def returns_text(function: Function) -> bool:
    """Whether a function returns a text, or several texts."""
    return is_text(function.returns)


def shown(node: ast.expr) -> str:
    """Return an expression as text, with `{…}` around each value."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Constant():
            return ast.unparse(node)
        case ast.JoinedStr(values=values):
            return "".join(shown(one) for one in values)
        case ast.FormattedValue(value=value, conversion=conversion, format_spec=spec):
            inner = f"{{{ast.unparse(value)}"
            inner += f"!{chr(conversion)}" if conversion > 0 else ""
            inner += f":{shown(spec)}" if isinstance(spec, ast.JoinedStr) else ""
            return inner + "}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return shown(left) + shown(right)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"«{shown(body)}» if {ast.unparse(test)} else «{shown(orelse)}»"
        case ast.List(elts=items) | ast.Tuple(elts=items):
            # One item at a time, because versions of Python quote a nested text differently.
            return f"[{', '.join(map(shown, items))}]"
        case _:
            return f"{{{ast.unparse(node)}}}"


def logged(call: ast.Call) -> tuple[str, list[ast.expr]]:
    """Return the text of a log record with its values in place of `%s`, and the expressions of both."""
    text, *values = call.args[call.func.attr == "log" if isinstance(call.func, ast.Attribute) else 0 :]
    rest = iter(values)
    pieces = re.split(r"(%[-+#0-9.]*[a-zA-Z])", shown(text))
    words = [shown(next(rest)) if re.fullmatch(r"%[-+#0-9.]*[a-zA-Z]", piece) else piece for piece in pieces]
    return "".join(words).replace("%%", "%"), [text, *values]


# --- all of them


class Reader:
    """Reads all modules, and follows the names in their texts until no new text is found."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self.told: dict[str, dict[Told, None]] = {name: {} for name in self.names}
        self._returned: set[Function] = set()
        self._handed: set[Parameter] = set()
        for name in self.names:
            here = source(name)
            for call in here.calls:
                self._call(here, call)
            for node in here.errors:
                if isinstance(node, ast.Raise):
                    self._raised(here, node)
                elif is_error(name, node.name):
                    self._class(here, node)
        for name, owner, function in ALSO:
            self._returns(source(name), _function(name, owner, function))
        for name, owner, function, parameter in COLLECTED:
            found = _function(name, owner, function)
            self._hand(Parameter(name, source(name).where(found), parameter), found)

    def text(self) -> str:
        """The list, by module and by function."""
        lines = [HEAD.rstrip()]
        for name in self.names:
            if self.told[name]:
                lines += ["", f"[{name}]"]
            last = None
            for one in sorted(self.told[name], key=lambda one: one.where):
                if one.where != last:
                    lines.append(f"  {one.where}")
                    last = one.where
                lines += _wrapped(f"{one.kind}: {one.text}", 4)
                for each in one.filled:
                    lines += _wrapped(each, 10)
        return "\n".join(lines) + "\n"

    def _call(self, here: Source, call: ast.Call) -> None:
        match call.func:
            case ast.Name(id=name) if is_error(here.name, name) or name in OUTCOMES:
                given = list(arguments(call))
                values = [shown(value) if name is None else f"{name}={shown(value)}" for name, value in given]
                if is_error(here.name, name) and given and given[0][0] is None:
                    values = [values[0] + "".join(f"  [{one}]" for one in values[1:])]
                self._tell(here, call, name, " | ".join(values) or "(no text)", [value for _, value in given])
            case ast.Attribute(value=ast.Name(id=owner), attr=level) if owner in LOGGERS and level in LEVELS:
                text, spoken = logged(call)
                kind = LEVELS[level] if level != "log" else f"LOG {ast.unparse(call.args[0])}"
                self._tell(here, call, kind, text, spoken)
            case ast.Attribute(value=ast.Name(id="warnings"), attr="warn"):
                self._tell(here, call, "WARN", shown(call.args[0]), call.args[:1])
            case _ if call.args and _is_for_stderr(call):
                self._tell(here, call, "STDERR", shown(call.args[0]), call.args[:1])

    def _raised(self, here: Source, node: ast.Raise) -> None:
        """List a raised class, and an error that a call of an unknown function makes."""
        match node.exc:
            case ast.Name(id=name) if is_error(here.name, name):
                self._tell(here, node, name, "(no text)", [])
            case ast.Call() as made if called(here, made) is None and any(is_prose(here, one) for one in made.args):
                if not (isinstance(made.func, ast.Name) and is_error(here.name, made.func.id)):
                    self._tell(here, node, ast.unparse(made.func), " | ".join(map(shown, made.args)), made.args)

    def _class(self, here: Source, node: ast.ClassDef) -> None:
        """List the text of an exception class that composes its own text."""
        for inner in ast.walk(node):
            match inner:
                case ast.Call(
                    func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__"), args=[_, *_]
                ):
                    if not isinstance(inner.args[0], ast.Name) or len(inner.args) > 1:
                        self._tell(here, inner, node.name, " | ".join(map(shown, inner.args)), inner.args)
                case ast.FunctionDef(name="__str__"):
                    self._returns(here, inner)

    def _tell(self, here: Source, node: ast.AST, kind: str, text: str, values: Iterable[ast.expr]) -> None:
        filled = tuple(dict.fromkeys(one for value in values for one in self._follow(here, node, value)))
        self.told[here.name][Told(here.where(node), kind, text, filled)] = None

    def _follow(self, here: Source, node: ast.AST, value: ast.expr, seen: set[str] | None = None) -> Iterator[str]:
        """Yield the texts of the names in an expression. ``seen`` holds the names that are already followed."""
        seen = set() if seen is None else seen
        for one in parts(here, value):
            match one:
                case ast.Name(id=name) if name not in seen:
                    seen.add(name)
                    for found in self._name(here, node, name):
                        if isinstance(found, ast.Dict):
                            for key, text in zip(found.keys, found.values, strict=True):
                                if key is not None and is_prose(here, text):
                                    yield f"{name}[{ast.unparse(key)}] = {shown(text)}"
                        elif is_prose(here, found):
                            yield f"{name} = {shown(found)}"
                        yield from self._follow(here, node, found, seen)
                case ast.Call():
                    target = called(here, one)
                    if target is not None and isinstance(target[1], Function):
                        self._returns(target[0], target[1])
                case ast.Attribute(value=ast.Name(id="self"), attr=name) if owner := here.within(node):
                    self._attribute(here, owner, name)

    def _name(self, here: Source, node: ast.AST, name: str) -> Iterator[ast.expr]:
        """Yield the values of a name, from the enclosing functions or from the top level of a module."""
        for outer in (each for each in here.outside(node) if isinstance(each, Function)):
            if is_text(parameters(outer).get(name)):
                owner = here.around[outer]
                if not (isinstance(owner, ast.ClassDef) and outer.name == "__init__"):
                    self._hand(Parameter(here.name, here.where(outer), name), outer)
                else:
                    self._hand(Parameter(here.name, here.where(owner), name), owner)
            values = bound(outer).get(name, [])
            if values or name in parameters(outer):
                yield from values
                return
        found = defined(here.name, name)
        if found is not None and isinstance(found[1], ast.Assign | ast.AnnAssign) and found[1].value is not None:
            yield found[1].value

    def _attribute(self, here: Source, owner: ast.ClassDef, name: str) -> None:
        """Follow an attribute of an instance: a field to the calls of its class, and a method to its return values."""
        for node in owner.body:
            match node:
                case ast.AnnAssign(target=ast.Name(id=field_), annotation=annotation) if field_ == name:
                    if is_text(annotation):
                        self._hand(Parameter(here.name, here.where(owner), name), owner)
                case ast.FunctionDef(name=method) if method == name:
                    self._returns(here, node)

    def _returns(self, here: Source, function: Function) -> None:
        """List the return values of a function that returns texts."""
        if function in self._returned or not returns_text(function):
            return
        self._returned.add(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
                filled = tuple(dict.fromkeys(self._follow(here, node, node.value)))
                if is_prose(here, node.value) or filled:
                    told = Told(here.where(function), "returns", shown(node.value), filled)
                    self.told.setdefault(here.name, {})[told] = None

    def _hand(self, parameter: Parameter, owner: Function | ast.ClassDef) -> None:
        """List the texts that callers pass for a parameter."""
        if parameter in self._handed or owner.name in CLEANING or is_error(parameter.module, owner.name):
            return
        self._handed.add(parameter)
        names = parameters(owner) if isinstance(owner, Function) else fields_of(owner)
        bare = [name for name in names if name not in ("self", "cls")]
        of_class = calls().get("cls", ()) if isinstance(owner, ast.ClassDef) else ()
        for here, call in (*calls().get(owner.name, ()), *of_class):
            target = called(here, call)
            # A call on an unknown instance may mean this method, unless str, list or dict has a method of that name.
            unknown = target is None and len(methods().get(owner.name, ())) > 1 and owner.name not in OF_PYTHON
            if not unknown and (target is None or target[1] is not owner):
                continue
            for place, (name, value) in enumerate(arguments(call)):
                if (name or (bare[place] if place < len(bare) else None)) != parameter.name:
                    continue
                filled = tuple(dict.fromkeys(self._follow(here, call, value)))
                if is_prose(here, value) or filled:
                    what = f"for {parameter.owner.rpartition('.')[2]}({parameter.name})"
                    self.told[here.name][Told(here.where(call), what, shown(value), filled)] = None


def _function(name: str, owner: str, function: str) -> Function:
    """Return a function of a module by its class, or "" for a function of the module itself."""
    here = source(name)
    return next(
        node
        for node in ast.walk(here.tree)
        if isinstance(node, Function) and node.name == function and owner == getattr(here.around[node], "name", "")
    )


def _is_for_stderr(call: ast.Call) -> bool:
    """Whether a call prints to stderr, or ends the process with a text."""
    if ast.unparse(call.func) == "sys.exit":
        return any(isinstance(one, ast.Constant) and prose(str(one.value)) for one in ast.walk(call.args[0]))
    return ast.unparse(call.func) == "sys.stderr.write" or any(
        (one.arg, ast.unparse(one.value)) in (("file", "sys.stderr"), ("err", "True")) for one in call.keywords
    )


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text.replace("\n", "⏎"),
        WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 4),
        break_long_words=False,
        break_on_hyphens=False,
    )


def listed() -> str:
    """Return the list of all shipped modules."""
    return Reader(modules()).text()


def difference() -> str:
    """Return the differences between the file and the sources, with the remedy; empty if they are equal."""
    before, now = FILE.read_text().split("\n"), listed().split("\n")
    lines = list(difflib.unified_diff(before, now, "read", "found", lineterm="", n=3))
    return READ_IT + "\n".join(lines) if lines else ""


def main(arguments: list[str]) -> int:
    """Write the list, or compare it; return the exit status."""
    if arguments == ["compare"]:
        print(found := difference(), end="\n" if found else "", file=sys.stderr)
        return int(bool(found))
    if arguments:
        print("usage: python -m tests.project.messages [compare]", file=sys.stderr)
        return 2
    FILE.write_text(listed())
    print(f"{FILE.relative_to(ROOT)}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
