"""A shell script read as text: the runs of Python modules in it, with their words expanded.

Nothing is executed and no file is opened. tree-sitter's grammar of bash gives the tree; this module
follows assignments, expansions, conditions and functions on it, in an environment that is empty but
for what the caller gives. What only a run would tell stays unknown, by name.
"""

import fnmatch
import itertools
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from cpnorm.user_file import short

LARGEST = 1_000_000
"""Most bytes of a script, and most characters of a value."""

STEPS = 200_000
"""Most statements and expansions that are followed, loops included."""

DEEPEST = 50
"""Deepest calls of functions."""


class Word(NamedTuple):
    """A word of a command after expansion; `unknown` names what its text hangs on."""

    text: str
    unknown: tuple[str, ...]


class Launch(NamedTuple):
    """A run of a Python module or file: its words from `python` on, from `-m`, or from a command
    that is not known, the line of the script, and what decides whether the script comes there."""

    words: tuple[Word, ...]
    line: int
    unknown: tuple[str, ...]


class Script(NamedTuple):
    """The launches of a script in the order of their lines, and the variables that it reads or
    sets, `1` to `9` among them. `overwritten` has those that are given and that the script sets to
    another value, with the line; `ended` the line of the first `exit` that it comes to, if it does.
    """

    launches: tuple[Launch, ...]
    variables: frozenset[str]
    overwritten: dict[str, int]
    ended: int | None


def read(text: str, given: Mapping[str, str] = {}) -> Script:
    """The launches in bash `text`, with the variables and positional parameters `given`.

    A variable that the script sets keeps the script's value, unless that is unknown. `ValueError`,
    one sentence without its full stop, for text that is not bash, too large or too deep.
    """
    if len(source := text.encode(errors="surrogatepass")) > LARGEST:
        raise ValueError(f"the script has {len(source)} bytes, allowed are {LARGEST}")
    try:
        root = _parsed(source)
        reader = _Reader(given)
        reader.run(root)
        names = {n.text.decode() for n in _walk(root) if n.type == "variable_name"}
    except RecursionError:
        raise ValueError("the script is nested too deeply to be read") from None
    launches = sorted(reader.launches, key=lambda launch: launch.line)
    return Script(tuple(launches), frozenset(names), reader.overwritten, reader.ended)


def _parsed(source):
    parser = Parser(Language(tree_sitter_bash.language()))
    if b"\r\n" in source:
        raise ValueError("the script has Windows line ends, which bash does not take")
    # The grammar takes `$((` for a command's parentheses behind `:-`, but not within quotes, and a
    # bracket there for an error. It wants a line after a continuation.
    source = BARE_NUMBER.sub(rb'\1"$(( \2 ))"}', source)
    source = BARE_BRACKET.sub(rb"\1\\[", source)
    source = LAST_CONTINUATION.sub(b"\n", source)
    root = parser.parse(source).root_node
    for _ in range(PASSES):  # it cuts $a/$b/$c, and not ${a}/${b}/${c}
        if not (bare := _bare_signs(root, source)):
            break
        for found in bare:
            source = b"%s${%s}%s" % (source[: found.start()], found[1], source[found.end() :])
        root = parser.parse(source).root_node
    for node in _walk(root):
        rest = node.next_sibling if node.type == "variable_assignment" else None
        if rest is not None and rest.is_named and rest.start_byte == node.end_byte:
            raise ValueError(f"line {_line(rest)} cannot be read as bash")
    for found in BLANK_ESCAPED.finditer(source):  # it may lose that word
        if root.descendant_for_byte_range(found.start(), found.start()).type not in TEXTS:
            line = source.count(b"\n", 0, found.start()) + 1
            last = source[found.end() : found.end() + 1] in (b"\n", b"")
            what = "ends in a backslash and a blank, which does not continue it in bash"
            raise ValueError(f"line {line} {what if last else 'cannot be read as bash'}")
    if root.has_error:
        wrong = next((n for n in _walk(root) if n.is_error or n.is_missing), root)
        raise ValueError(f"line {_line(wrong)} cannot be read as bash")
    return root


def _bare_signs(root, source):
    """Where the grammar leaves the `$` of a variable alone, the last first."""
    signs = (n for n in _walk(root) if n.type == "$" and n.parent.type == "concatenation")
    found = (BARE_NAME.match(source, n.start_byte) for n in signs)
    return sorted(filter(None, found), key=lambda match: -match.start())


def _name(node):
    return node.child_by_field_name("name") or node


def _lines_before(node):
    """Assignments on a line of their own, which the grammar takes for those of the next command."""
    found = [c for c in node.children if c.type == "variable_assignment"]
    if not found or node.child_by_field_name("name") is None:
        return ()
    between = node.text[
        found[-1].end_byte - node.start_byte : _name(node).start_byte - node.start_byte
    ]
    return found if b"\n" in between.replace(b"\\\n", b"") else ()


def _in_quotes(node):
    """Whether an expansion stands within double quotes, where single ones are letters."""
    while node.type in ("expansion", "concatenation"):
        node = node.parent
    return node.type in ("string", "heredoc_body")


def _taken(node, status):
    """The status of a statement, success for a command that nothing is asked of."""
    if status is None and node.type in ("command", "redirected_statement"):
        return None if _decoded(node.text).split()[0] in QUERIES else True
    return status


def _is_array(value):
    return isinstance(value, tuple) and not isinstance(value, Word)


def _alike(pair):
    return pair[0] == pair[1]


def _walk(node):
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack += reversed(node.children)


def _line(node):
    return node.start_point.row + 1


BARE_NUMBER = re.compile(rb"(\$\{\w+:?[-=+])\$\(\(([\w\s()+*/%${}-]*?)\)\)\}")
BARE_BRACKET = re.compile(rb"((?<=[\s=])\$\{\w+:?[-=+])\[")
LAST_CONTINUATION = re.compile(rb"\\\n?\Z")
BARE_NAME = re.compile(rb"\$([A-Za-z_]\w*)")
PASSES = 20
"""How often a script is parsed again, for what the grammar cut."""

BLANK_ESCAPED = re.compile(rb"(?<!\\)\\[ \t]+")
TEXTS = ("string", "string_content", "raw_string", "ansi_c_string", "heredoc_body", "comment")
TEXTS += ("heredoc_content", "word", "concatenation", "regex", "extglob_pattern", "expansion")
QUERIES = ("[", "test", "command", "which", "type", "grep", "pgrep", "ping", "curl", "nc", "diff")
"""Commands whose status is asked for; any other is taken to succeed."""

UNSET = "unset"
"""In place of a variable's value: the script unset it."""


@dataclass
class _State:
    """Variables are words, tuples of words for arrays, or `UNSET`; one that is in none of the
    mappings was never set. `exact`: there are no more positional parameters than those. `flow` is
    why the rest of a sequence is not run."""

    variables: dict
    positional: tuple[Word, ...]
    exact: bool = False
    functions: dict[str, Node] = field(default_factory=dict)
    sourced: tuple[str, ...] = ()
    flow: str | None = None

    def copy(self):
        return replace(self, variables=dict(self.variables), functions=dict(self.functions))


class _Part(NamedTuple):
    """A piece of a word: split at white space where it is `loose`. `breaks` begins a new field.

    The text of an unknown piece has a `$` and no white space: split, its word is still found.
    """

    text: str
    unknown: tuple[str, ...] = ()
    loose: bool = False
    breaks: bool = False


SPLIT = "split"  # an expansion without quotes
SEQUENCES = ("program", "do_group", "compound_statement", "else_clause")
QUIET = {"true": True, ":": True, "false": False}
READS = ("read", "mapfile", "readarray", "getopts")
ENVIRONMENT = re.compile(r".*(/set_env\.sh|/activate|bashrc|profile|/setvars\.sh|conda\.sh)")
"""Files that people source for paths and libraries."""

BRACES = re.compile(r"\{[^\s{}]*,[^\s{}]*\}|\{-?\w+\.\.-?\w+(\.\.-?\d+)?\}")
NAME = re.compile(r"[A-Za-z_]\w*")
PARAMETER = re.compile(
    r"\$\{(?P<sign>[#!]?)(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!-])(?P<index>\[[^\]]*\])?"
    r"(?P<operator>:[-=+?]|[-=+?]|,,?|\^\^?|%%?|##?|//?[#%]?|:)?"
)
PYTHON = re.compile(r"(.*/)?(python[\d.]*|torchrun|accelerate)")
MODULE = re.compile(r"[A-Za-z_][\w.]*\.[\w.]+")
SETTING = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@:-]*=|--config-(name|path)")
SLICE = re.compile(rb"\$\{(?:@|\w+\[@\]):\s?([1-9]\d{0,3})(?::(\d{1,4}))?\}")
INSIDE = re.compile(r"\s-m\s+\S*\.\S|\.py\s|python\S* ")
PRINTS = ("echo", "printf", "pip", "grep")
SHELLS = re.compile(r"(.*/)?(ba|da|z)?sh")


class _Reader:
    def __init__(self, given):
        self.given = {n: Word(v, ()) for n, v in given.items() if NAME.fullmatch(n)}
        places = sorted(int(n) for n in given if n.isdigit())
        top = places[-1] if places else 0
        positional = [Word(given.get(str(i), f"${i}"), ()) for i in range(1, top + 1)]
        for i in set(range(1, top + 1)) - set(places):
            positional[i - 1] = Word(f"${i}", (str(i),))
        self.state = _State(dict(self.given), tuple(positional))
        self.launches, self.why, self.steps, self.depth = [], (), 0, 0
        self.unsure, self.locals = False, []
        self.loops, self.overwritten, self.ended = [], {}, None

    def run(self, root):
        self.sequence(root)

    def step(self, node):
        self.steps += 1
        if self.steps > STEPS:
            raise ValueError(f"line {_line(node)} runs too often, allowed are {STEPS} steps in all")

    # Statements: each gives its status, None where only a run would tell.

    def sequence(self, node):
        status = True
        children = [c for c in node.children if c.is_named and c.type != "comment"]
        for child in children:
            if self.state.flow:
                break
            after = child.next_sibling
            if after is not None and after.type == "&":
                self.apart(child)
            else:
                status = self.statement(child)
        return status

    def statement(self, node):
        self.step(node)
        if node.type == "compound_statement" and node.children[0].type == "((":
            return self.number_status(node)
        if node.type in SEQUENCES:
            return self.sequence(node)
        method = getattr(self, f"do_{node.type}", None)
        if method is None:
            return self.forget(node)
        return method(node)

    def apart(self, node):
        """A statement in a shell of its own: its variables are gone after it."""
        before = self.state
        self.state = before.copy()
        status = self.statement(node)
        self.state = before
        return status

    def branches(self, options, why):
        """One of several ways, nobody knows which: what they agree on is kept."""
        before, outer, after = self.state, self.why, []
        self.why = (*outer, *why)
        for option in options:
            self.state = before.copy()
            option()
            if self.state.flow in ("break", "continue", "return") and self.loops:
                self.loops[-1] = True
                self.state.flow = None
            if self.state.flow is None:
                after.append(self.state)
        self.why = outer
        if not after:
            self.state.flow = "exit"
            return
        self.state = after[0]
        for other in after[1:]:
            self.merge(other, why)

    def merge(self, other, why):
        mine, theirs = self.state.variables, other.variables
        for name in mine.keys() | theirs.keys():
            one, two = mine.get(name), theirs.get(name)
            if one != two and _is_array(one) and _is_array(two):
                pairs = itertools.takewhile(_alike, zip(one, two, strict=False))
                mine[name] = (*(word for word, _ in pairs), Word(f"${name}", tuple(why)))
            elif one != two:
                known = {u for v in (mine.get(name), theirs.get(name)) for u in _unknown(v)}
                self.mark(name, tuple(dict.fromkeys((*why, *sorted(known)))))
        if self.state.positional != other.positional:
            self.state.positional = (Word("$@", tuple(why)),)
        self.state.functions = other.functions | self.state.functions
        self.state.sourced = tuple(dict.fromkeys((*self.state.sourced, *other.sourced)))

    def mark(self, name, unknown):
        """The variable `name` has a value that hangs on `unknown`."""
        if _is_array(self.state.variables.get(name)):
            self.state.variables[name] = (Word(f"${name}", unknown),)
            return
        self.state.variables[name] = self.given.get(name, Word(f"${name}", unknown))

    def forget(self, node):
        """A statement that is not followed: what it sets is unknown after it."""
        for name in _assigned(node):
            self.mark(name, (name,))
        for inner in _walk(node):
            if inner.type == "command" and not self.steps > STEPS:
                self.command_apart(inner, (_source(node),))
        return None

    def command_apart(self, node, why):
        before, outer = self.state, self.why
        self.state, self.why = before.copy(), (*outer, *why)
        self.do_command(node)
        self.state, self.why = before, outer

    def do_comment(self, node):
        return True

    def do_list(self, node):
        left, right = (c for c in node.named_children if c.type != "comment")
        wanted = any(c.type == "&&" for c in node.children)
        status = self.statement(left)
        if self.state.flow:
            return status
        status = _taken(left, status)
        if status is None:
            self.branches([lambda: self.statement(right), lambda: None], self.reasons(left))
            return None
        return _taken(right, self.statement(right)) if status == wanted else status

    def do_negated_command(self, node):
        status = self.statement(node.named_children[0])
        return None if status is None else not status

    def do_pipeline(self, node):
        for child in node.named_children:
            self.apart(child)
        return None

    def do_subshell(self, node):
        before = self.state
        self.state = before.copy()
        status = self.sequence(node)
        self.state = before
        return status

    def do_redirected_statement(self, node):
        body = node.child_by_field_name("body")
        if body is None:
            return True
        # The grammar takes words after a redirection for more of its destinations.
        more = []
        for redirect in node.children_by_field_name("redirect"):
            shells = any(map(SHELLS.fullmatch, body.text.decode().split()))
            for document in redirect.named_children if shells else ():
                if document.type == "heredoc_body":
                    self.text_apart(node, document.text.decode())
            more += redirect.children_by_field_name("destination")[1:]
            if redirect.type == "heredoc_redirect":
                more += redirect.children_by_field_name("argument")
        if body.type == "command":
            return self.do_command(body, more)
        return self.statement(body)

    def do_test_command(self, node):
        first = node.children[0].type
        if first == "((":
            return self.number_status(node)
        inner = node.named_children
        if len(inner) != 1 or (first == "[" and _has_and_or(node)):
            return None
        return self.condition(inner[0], double=first == "[[")

    def do_if_statement(self, node):
        tests = [c for c in node.children_by_field_name("condition") if c.is_named]
        clauses = [c for c in node.named_children if c.type in ("elif_clause", "else_clause")]
        start = next(i for i, c in enumerate(node.children) if c.type == "then")
        body = [c for c in node.children[start:] if c.is_named and c not in clauses]
        return self.choose(tests, body, clauses)

    def choose(self, tests, body, clauses):
        status = None
        for test in tests:
            status = self.statement(test)
        then = self.all_of(body)

        def otherwise():
            if not clauses:
                return True
            if clauses[0].type == "else_clause":
                return self.sequence(clauses[0])
            children = clauses[0].children
            middle = next(i for i, c in enumerate(children) if c.type == "then")
            tests = [c for c in children[:middle] if c.is_named]
            body = [c for c in children[middle:] if c.is_named]
            return self.choose(tests, body, clauses[1:])

        if status is None:
            self.branches([then, otherwise], self.reasons(*tests))
            return None
        return then() if status else otherwise()

    def all_of(self, nodes):
        def run():
            status = True
            for node in nodes:
                if self.state.flow:
                    break
                status = self.statement(node)
            return status

        return run

    def do_while_statement(self, node):
        tests = [c for c in node.children_by_field_name("condition") if c.is_named]
        body = node.child_by_field_name("body")
        wanted = node.children[0].type == "while"
        while True:
            status = None
            for test in tests:
                status = self.statement(test)
            if status is None:
                return self.perhaps(node, [body], self.reasons(*tests))
            if status != wanted or not self.round(body) or self.unsure:
                return True

    def do_for_statement(self, node):
        name = node.child_by_field_name("variable").text.decode()
        values = node.children_by_field_name("value")
        words = list(self.fields(values))
        if not any(c.type == "in" for c in node.children):
            words = list(self.state.positional)
        body = node.child_by_field_name("body")
        if node.children[0].type != "for":
            return self.forget(node)
        for word in words:
            self.step(node)
            self.state.variables[name] = word
            if not self.round(body):
                break
        return True

    def do_c_style_for_statement(self, node):
        return self.perhaps(node, [node.child_by_field_name("body")], (_source(node),))

    def round(self, body):
        """One round of a loop; whether the next may come."""
        self.loops.append(False)
        self.statement(body)
        self.unsure = self.loops.pop()
        if self.unsure:
            for name in _assigned(body):
                self.mark(name, (name,))
        if self.state.flow == "break":
            self.state.flow = None
            return False
        if self.state.flow == "continue":
            self.state.flow = None
        return self.state.flow is None

    def perhaps(self, node, bodies, why):
        """A loop of which nobody knows how often it runs."""
        names = _assigned(node)
        for name in names:
            self.mark(name, (name,) if NAME.fullmatch(name) else tuple(why))
        self.loops.append(True)
        self.branches([self.all_of(bodies), lambda: None], why)
        self.loops.pop()
        for name in names:
            self.mark(name, (name,))
        return None

    def do_case_statement(self, node):
        value = self.single(node.child_by_field_name("value"))
        items = [c for c in node.named_children if c.type == "case_item"]
        ways, why = [], list(value.unknown)
        for item in items:
            patterns = item.children_by_field_name("value")
            body = [c for c in item.named_children if c not in patterns]
            matches = [self.matches(value, p) for p in patterns]
            if any(c.type in (";&", ";;&") for c in item.children):
                return self.forget(node)
            if True in matches:
                ways.append(self.all_of(body))
                break
            if None in matches:
                why += [u for p in patterns for u in self.single(p).unknown]
                why = why or [_source(item)]
                ways.append(self.all_of(body))
        else:
            ways.append(lambda: True)
        if len(ways) == 1:
            return ways[0]()
        self.branches(ways, tuple(dict.fromkeys(why)))
        return None

    def do_function_definition(self, node):
        name = node.child_by_field_name("name").text.decode()
        self.state.functions[name] = node.child_by_field_name("body")
        return True

    def do_variable_assignments(self, node):
        for child in node.named_children:
            self.statement(child)
        return True

    def do_variable_assignment(self, node):
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        more = any(c.type == "+=" for c in node.children)
        if target.type == "subscript":
            name = target.child_by_field_name("name").text.decode()
            self.mark(name, (name,))
            if not isinstance(self.state.variables[name], Word):
                return True
            self.state.variables[name] = (Word(f"${name}", (name,)),)
            return True
        name = target.text.decode()
        old = self.state.variables.get(name)
        if value is not None and value.type == "array":
            inside = [c for c in value.named_children if c.type != "comment"]
            new = tuple(self.fields(inside))
            if more and old is not None and old != UNSET:
                new = (*((old,) if isinstance(old, Word) else old), *new)
            self.put(name, new)
            return True
        new = Word("", ()) if value is None else self.single(value)
        if more:
            old = self.value(name)
            new = Word(old.text + new.text, (*old.unknown, *new.unknown))
        elif old is not None and old != UNSET and not isinstance(old, Word):
            new = (new, *old[1:])
        self.put(name, new)
        own = value is not None and re.search(rf"\b{name}\b", _decoded(value.text))
        if name in self.given and self.state.variables[name] != self.given[name] and not own:
            self.overwritten.setdefault(name, _line(node))
        return True

    def put(self, name, value):
        if isinstance(value, Word):
            if value.unknown and name in self.given:
                value = self.given[name]
            names = (u if NAME.fullmatch(u) or u.isdigit() else name for u in value.unknown)
            value = value._replace(unknown=tuple(dict.fromkeys(names)))
        if sum(len(w.text) for w in ([value] if isinstance(value, Word) else value)) > LARGEST:
            raise ValueError(f"{name} grows beyond {LARGEST} characters")
        self.state.variables[name] = value

    def do_declaration_command(self, node):
        own = self.locals and node.children[0].text in (b"local", b"declare", b"typeset")
        for child in node.named_children:
            if own and child.type in ("variable_assignment", "variable_name"):
                name = (child.child_by_field_name("name") or child).text.decode()
                self.locals[-1].setdefault(name, self.state.variables.get(name))
                self.state.variables[name] = UNSET
            if child.type == "variable_assignment":
                self.statement(child)
        return True

    def do_unset_command(self, node):
        for child in node.named_children:
            name = child.text.decode()
            if NAME.fullmatch(name):
                self.state.variables[name] = UNSET
        return True

    def do_command(self, node, more=()):
        for child in _lines_before(node):
            self.statement(child)
        skip = ("variable_assignment", "comment")
        skip += ("file_redirect", "herestring_redirect", "heredoc_redirect")
        nodes = [c for c in node.children if c.type not in skip]
        words = tuple(self.fields([*nodes, *more]))
        while words and words[0].text in ("builtin", "command", "exec") and len(words) > 1:
            if words[0].text == "exec":
                self.call(node, words[1:])
                self.state.flow = "exit"
                return None
            words = words[1:]
        return self.call(node, words) if words else True

    def call(self, node, words):
        name, texts = words[0].text, [w.text for w in words]
        if words[0].unknown:
            first = len(self.launches)
            self.look_for_launch(node, words)
            if len(self.launches) == first and any(map(SETTING.match, texts[1:])):
                self.found(node, words)
            return None
        if name in self.state.functions:
            return self.function(node, name, words[1:])
        if name in QUIET:
            return QUIET[name]
        if name in ("break", "continue", "return", "exit"):
            self.state.flow = name
            if name == "exit" and self.ended is None:
                self.ended = _line(node)
            return True
        if name == "set":
            if "--" in texts:
                self.state.positional = words[texts.index("--") + 1 :]
                self.state.exact = True
            return True
        if name == "shift":
            count = int(texts[1]) if len(texts) > 1 and texts[1].isdigit() else 1
            self.state.positional = self.state.positional[count:]
            return True
        if name in READS or (name == "printf" and "-v" in texts):
            for text in filter(NAME.fullmatch, texts[1:]):
                self.mark(text, (text,))
            return None
        if name in (".", "source", "eval", "let"):
            self.foreign(node, name, words[1:])
            return None
        first = len(self.launches)
        self.look_for_launch(node, words)
        if len(self.launches) == first and name not in PRINTS:
            for text in texts[1:]:  # as behind bash -c, ssh, srun or docker exec
                if INSIDE.search(text):
                    self.text_apart(node, text)
        return None

    def foreign(self, node, name, words):
        """Code that is not in the script may set any variable that the script has not."""
        text = " ".join(w.text for w in words)
        if name == "let":
            for found in NAME.findall(text):
                self.mark(found, (found,))
        elif name == "eval":
            self.text(node, text)
            if any(w.unknown for w in words):
                self.state.sourced = (*self.state.sourced, _source(node))
        elif not (ENVIRONMENT.fullmatch(text)):
            self.state.sourced = (*self.state.sourced, _source(node))

    def text_apart(self, node, text):
        """A command line in a word, run by a shell of its own."""
        before = self.state
        self.state = before.copy()
        self.text(node, text)
        self.state = before

    def text(self, node, text):
        """A command line in a word, run where the word is."""
        try:
            root = _parsed(text.encode(errors="surrogatepass"))
        except ValueError:
            return
        first = len(self.launches)
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError(f"line {_line(node)} calls too deeply, allowed is {DEEPEST}")
        self.sequence(root)
        self.depth -= 1
        for i in range(first, len(self.launches)):
            self.launches[i] = self.launches[i]._replace(line=_line(node))

    def function(self, node, name, words):
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError(f"line {_line(node)} calls {name} too deeply, allowed is {DEEPEST}")
        outer = self.state.positional, self.state.exact
        self.state.positional, self.state.exact = tuple(words), True
        loops, self.loops = self.loops, [False]
        self.locals.append({})
        status = self.statement(self.state.functions[name])
        unsure, self.loops = self.loops.pop(), loops
        if unsure:
            for changed in _assigned(self.state.functions[name]):
                self.mark(changed, (changed,))
            status = None
        for local, value in self.locals.pop().items():
            self.state.variables[local] = UNSET if value is None else value
        self.state.positional, self.state.exact = outer
        self.depth -= 1
        if self.state.flow == "return":
            self.state.flow, status = None, None
        return status

    def look_for_launch(self, node, words):
        texts = [w.text for w in words]
        first = next((i for i, text in enumerate(texts) if PYTHON.fullmatch(text)), None)
        if SHELLS.fullmatch(texts[0]) or texts[0] in PRINTS:
            return
        if "xargs" in texts:
            words = (*words, Word("$stdin", ("what xargs reads",)))
        for i, text in enumerate(texts):
            start = i if first is None or first > i else first
            rest = texts[i + 1 :]
            if text == "-m" and rest and (words[i + 1].unknown or MODULE.fullmatch(rest[0])):
                known = rest[0].startswith(("verl.", "recipe."))
                if known or any(SETTING.match(one) for one in rest[1:]):
                    self.found(node, words[start:])
                    return
            if text.endswith(".py") and start < i and any(SETTING.match(one) for one in rest):
                self.found(node, words[start:])
                return

    def found(self, node, words):
        why = tuple(dict.fromkeys(self.why))
        self.launches.append(Launch(tuple(words), _line(_name(node)), why))

    # Conditions

    def condition(self, node, double):
        self.step(node)
        if node.type == "parenthesized_expression":
            return self.condition(node.named_children[0], double)
        if node.type == "negation_expression" or (
            node.type == "unary_expression" and node.children[0].type == "!"
        ):
            status = self.condition(node.named_children[-1], double)
            return None if status is None else not status
        if node.type == "unary_expression":
            return self.unary(node.children[0].text.decode(), node.named_children[-1])
        if node.type == "binary_expression":
            return self.binary(node, double)
        word = self.single(node)
        return None if word.unknown else word.text != ""

    def unary(self, sign, node):
        if sign not in ("-z", "-n") or b"@" in node.text:  # a list may be no word, or several
            return None
        word = self.single(node, empty=True)
        if word.unknown:
            return None
        return (word.text == "") == (sign == "-z")

    def binary(self, node, double):
        left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
        sign = node.child_by_field_name("operator").text.decode()
        if sign in ("&&", "||"):
            one, two = (self.condition(side, double) for side in (left, right))
            if (sign == "||") in (one, two):
                return sign == "||"
            return None if None in (one, two) else sign == "&&"
        if b"@" in left.text + right.text:  # a list may be no word, or several
            return None
        word = self.single(left)
        if sign in ("=", "==", "!="):
            same = self.matches(word, right, pattern=double)
            return None if same is None else same == (sign != "!=")
        other = self.single(right)
        if sign in NUMERIC and not (word.unknown or other.unknown):
            try:
                return NUMERIC[sign](_integer(word.text), _integer(other.text))
            except ValueError:
                return None
        return None

    def matches(self, word, node, pattern=True):
        """Whether a word is the pattern in `node`; None where nobody knows."""
        if node.type in ("regex", "extglob_pattern") and re.search(rb"[$\"'`]", node.text):
            try:  # the grammar does not look into it
                (assignment,) = _parsed(b"x=" + node.text).named_children
                node = assignment.child_by_field_name("value")
            except ValueError:
                return None
            if node is None:
                return None
        other = self.single(node)
        if word.unknown or other.unknown:
            return None
        if pattern and node.type not in ("string", "raw_string"):
            if re.search(r"[@?*+!]\(|\\", other.text):
                return None
            if node.type == "concatenation" and any(
                c.type in ("string", "raw_string") and re.search(r"[*?[]", c.text.decode())
                for c in node.children
            ):
                return None
            return fnmatch.fnmatchcase(word.text, other.text)
        return word.text == other.text

    def reasons(self, *nodes):
        """What an undecided condition hangs on: unknown variables, else its own text."""
        names = []
        for node in nodes:
            for inner in _walk(node):
                if inner.type in ("simple_expansion", "expansion"):
                    names += self.single(inner).unknown
                elif inner.type == "variable_name" and inner.parent.type.endswith("_expression"):
                    names += self.value(inner.text.decode()).unknown
        return tuple(dict.fromkeys(names)) or tuple(_source(node) for node in nodes)

    # Expansion

    def single(self, node, empty=False):
        """A word that is not split, as on the right of an assignment."""
        parts = list(self.parts(node, quoted=True, empty=empty))
        text = "".join((" " if p.breaks else "") + p.text for p in parts)
        return self.bounded(node, Word(text, _names(parts)))

    def fields(self, nodes):
        """The words that nodes of a command become; adjacent nodes are one word."""
        groups = []
        for node in nodes:
            if groups and not _between(groups[-1][-1], node):
                groups[-1].append(node)
            else:
                groups.append([node])
        for group in groups:
            yield from self.split(group)

    def split(self, group):
        fields, open_ = [], None
        parts = [p for node in group for p in self.parts(node)]
        for part in parts:
            if part.breaks and open_ is not None:
                fields.append(open_)
                open_ = None
            if not part.loose:
                open_ = _joined(open_, part.text, part.unknown)
                continue
            pieces = part.text.split()
            if part.text[:1].isspace() and open_ is not None:
                fields.append(open_)
                open_ = None
            for i, piece in enumerate(pieces):
                if i:
                    fields.append(open_)
                    open_ = None
                open_ = _joined(open_, piece, part.unknown if "$" in piece else ())
            if part.text[-1:].isspace() and open_ is not None:
                fields.append(open_)
                open_ = None
        if open_ is not None:
            fields.append(open_)
        for word in fields:
            yield self.bounded(group[0], word)

    def bounded(self, node, word):
        if len(word.text) > LARGEST:
            raise ValueError(f"a word of line {_line(node)} grows beyond {LARGEST} characters")
        return word

    def parts(self, node, quoted=False, empty=False):
        """The pieces of a node, in order. `empty`: a variable that was never set counts as ""."""
        self.step(node)
        kind = node.type
        if kind in ("command_name", "concatenation"):
            yield from self.literal(node, node.start_byte, node.end_byte, quoted, empty)
            return
        if kind in ("string", "translated_string"):
            start = node.start_byte + (2 if kind == "translated_string" else 1)
            if kind == "translated_string" and node.named_children:
                yield from self.parts(node.named_children[0], quoted, empty)
                return
            inner = [c for c in node.children if c.type in EXPANSIONS]
            if not (len(inner) == 1 and re.fullmatch(rb'"\$(@|\{\w*[@[].*\})"', node.text)):
                yield _Part("")
            yield from self.string(node, start, node.end_byte - 1, empty)
        elif kind == "raw_string":
            yield _Part(_source(node, whole=True)[1:-1])
        elif kind == "ansi_c_string":
            yield self.ansi(node)
        elif kind in ("simple_expansion", "expansion"):
            yield from self.expansion(node, quoted, empty)
        elif kind == "arithmetic_expansion":
            yield _Part(" " * (len(node.text) - len(node.text.lstrip())))
            yield self.arithmetic(node)
        elif kind in ("command_substitution", "process_substitution") or kind == "array":
            yield _hidden(_source(node), (_source(node),))
        elif node.named_children and kind not in ("word", "number", "regex", "extglob_pattern"):
            yield from self.literal(node, node.start_byte, node.end_byte, quoted, empty)
        else:
            text = _source(node, whole=True)
            if kind == "word" and not quoted and (found := BRACES.search(text)):
                yield _hidden(text, (found[0],))
                return
            yield from self.tilde(node, _unescaped(text), quoted)

    def tilde(self, node, text, quoted):
        before = node.prev_sibling
        starts = before is None or before.end_byte < node.start_byte or before.type in ("=", "+=")
        if starts and re.match(r"~(/|$)", text):
            yield _Part("$HOME" + text[1:], ("HOME",))
        else:
            yield _Part(text)

    def literal(self, node, start, end, quoted, empty):
        """Children, and the text between them, as one word."""
        whole, mask = node.text, bytearray(node.text)
        for child in node.children:
            if child.type not in ("word", "number") and child.is_named:
                at = child.start_byte - start
                mask[at : at + len(child.text)] = b"\0" * len(child.text)
        found = BRACES.search(mask.decode(errors="replace"))
        if found and node.type != "command_name" and not quoted:
            yield _hidden(_source(node), (_source(node),))
            return
        at = start
        for child in node.children:
            if child.start_byte > at:
                yield _Part(_unescaped(_decoded(whole[at - start : child.start_byte - start])))
            yield from self.parts(child, quoted, empty)
            at = child.end_byte
        if at < end:
            yield _Part(_unescaped(_decoded(whole[at - start :])))

    def string(self, node, start, end, empty):
        """The inside of double quotes."""
        at, base, whole = start, node.start_byte, node.text
        for child in node.children:
            if child.type not in EXPANSIONS:
                continue
            if child.start_byte > at:
                yield _Part(_unquoted(_decoded(whole[at - base : child.start_byte - base])))
            yield from self.parts(child, quoted=True, empty=empty)
            at = child.end_byte
        if at < end:
            yield _Part(_unquoted(_decoded(whole[at - base : end - base])))

    def ansi(self, node):
        text = _source(node, whole=True)[2:-1]
        if re.search(r"\\[^nt'\"\\]", text):
            return _hidden(text, (_source(node),))
        signs = {"n": "\n", "t": "\t"}
        return _Part(re.sub(r"\\(.)", lambda m: signs.get(m[1], m[1]), text))

    def value(self, name):
        """The word of a variable or a positional parameter; its own name where it is unknown."""
        if name.isdigit() and name != "0":
            place = int(name) - 1
            if place < len(self.state.positional):
                return self.state.positional[place]
            return Word("", ()) if self.state.exact else Word(f"${name}", (name,))
        value = self.state.variables.get(name)
        if value == UNSET:
            return Word("", ())
        if value is None:
            return Word(f"${name}", (name,))
        if isinstance(value, Word):
            return value
        return value[0] if value else Word("", ())

    def is_set(self, name):
        """Whether a variable was set, None where a sourced file may have done so."""
        if name.isdigit():
            return name == "0" or int(name) <= len(self.state.positional)
        value = self.state.variables.get(name)
        if value == UNSET or value == ():
            return False
        if value is not None:
            return True
        return None if self.state.sourced else False

    def expansion(self, node, quoted, empty):
        text = _source(node, whole=True)
        if space := text[: len(text) - len(text.lstrip())]:
            # Between two expansions in quotes the grammar takes white space for the second's.
            yield _Part(space)
            text = text.lstrip()
        if node.type == "simple_expansion":
            name, sign, index, sort = text[1:], "", None, None
        else:
            found = PARAMETER.match(text)
            if found is None:
                yield _hidden(_source(node), (_source(node),), not quoted)
                return
            name, sign = found["name"], found["sign"]
            index, sort = found["index"], found["operator"]
            if sort is None and found.end() != len(text) - 1:
                yield _hidden(_source(node), (_source(node),), not quoted)
                return
        many = name in "@*" or index in ("[@]", "[*]")
        if many:
            yield from self.elements(node, name, index, sign, sort, quoted)
            return
        if name == "#" and not sign:
            yield _Part(str(len(self.state.positional)), (), not quoted)
            return
        if not (NAME.fullmatch(name) or name.isdigit()) or sign == "!":
            yield _hidden(_source(node), (name if NAME.fullmatch(name) else _source(node),))
            return
        word = self.element(name, index)
        if empty and sort is None and self.is_set(name) is False:
            word = Word("", ())
        if sign == "#":
            yield _Part(str(len(word.text)), word.unknown, not quoted)
        elif sort is None:
            yield _Part(word.text, word.unknown, not quoted)
        else:
            argument = node, node.start_byte + len(space) + found.end()
            yield from self.operated(name, word, sort, argument, quoted)

    def element(self, name, index):
        """`${name}` or `${name[3]}`."""
        if index is None:
            return self.value(name)
        value = self.state.variables.get(name)
        if isinstance(value, Word) or value is None or value == UNSET:
            return self.value(name)
        if (unknown := _unknown(value)) or not index[1:-1].isdigit():
            return Word(f"${name}", unknown or (name,))
        place = int(index[1:-1])
        return value[place] if place < len(value) else Word("", ())

    def elements(self, node, name, index, sign, sort, quoted):
        """`"$@"`, `${name[@]}`, `${#name[@]}`."""
        if index is None:
            value = self.state.positional
        else:
            value = self.state.variables.get(name)
            if value == UNSET:
                value = ()
            elif value is None:
                value = (self.value(name),) if self.state.sourced or sort is None else ()
            elif isinstance(value, Word):
                value = (value,)
        if sign == "#" and sort is None:
            if unknown := _unknown(value):
                yield _hidden(_source(node), unknown)
            else:
                yield _Part(str(len(value)))
        elif found := SLICE.fullmatch(node.text):
            first = int(found[1]) - (index is None)  # $0 is no positional parameter here
            yield from self._each(value[first:][: found[2] and int(found[2])], False, quoted)
        elif sign or (sort and sort not in ("+", ":+", "-", ":-")):
            yield _hidden(_source(node), _unknown(value) or (_source(node),))
        elif sort and (sort[-1] == "+") != bool(value):
            if value:
                yield from self._each(value, name == "*" or index == "[*]", quoted)
            elif sort[-1] == "-":
                for child in node.named_children[1:]:
                    yield from self.parts(child, quoted)
        elif sort and sort[-1] == "+":
            # As in ${name[@]+"${name[@]}"}
            for child in node.named_children[1:]:
                yield from self.parts(child, quoted)
        else:
            yield from self._each(value, name == "*" or index == "[*]", quoted)

    def _each(self, value, star, quoted):
        for i, word in enumerate(value):
            if star and quoted:
                yield _Part((" " if i else "") + word.text, word.unknown)
            else:
                yield _Part(word.text, word.unknown, not quoted, breaks=i > 0)

    def operated(self, name, word, sort, argument, quoted):
        node, start = argument
        if sort in ("-", ":-", "=", ":=", "+", ":+", "?", ":?"):
            yield from self.defaulted(name, word, sort, node, start, quoted)
            return
        given = self.rest(node, start)
        if word.unknown or given is None or given.unknown:
            unknown = (*word.unknown, *(given.unknown if given else (_source(node),)))
            yield _hidden(_source(node), unknown, not quoted)
            return
        text = _operate(word.text, sort, given.text)
        if text is None:
            yield _hidden(_source(node), (_source(node),), not quoted)
        else:
            yield _Part(text, (), not quoted)

    def defaulted(self, name, word, sort, node, start, quoted):
        there = self.is_set(name)
        if there and sort[0] == ":":
            there = None if word.unknown and word.text[:1] == "$" else word.text != ""
        kind = sort[-1]
        if there is None:
            unknown = word.unknown or (name,)
            yield _hidden(_source(node), unknown, not quoted)
        elif there == (kind != "+"):
            yield _Part(word.text, word.unknown, not quoted)
        elif kind == "?":
            yield _hidden(_source(node), (name,), not quoted)
        elif kind == "+" and not there:
            yield _Part("", (), not quoted)
        else:
            parts = list(self.inside(node, start, quoted))
            if any(p.unknown for p in parts) and kind != "+":
                # Who gives the variable need not know what its default hangs on.
                parts = [p._replace(unknown=(name,) if p.unknown else ()) for p in parts]
            yield from parts
            if kind == "=":
                text = "".join(p.text for p in parts)
                self.put(name, Word(text, _names(parts)))

    def inside(self, node, start, quoted):
        """What stands after the operator of `${name:-...}`."""
        at, base, end = start, node.start_byte, node.end_byte - 1
        for child in node.children:
            if child.start_byte < start or child.end_byte > end:
                continue
            if child.start_byte > at:
                yield self.between(node.text[at - base : child.start_byte - base], quoted)
            plain = ("word", "regex", "number", *(["raw_string"] if _in_quotes(node) else []))
            if child.type in plain or not child.is_named:
                yield self.between(child.text, quoted)
            else:
                yield from self.parts(child, quoted)
            at = child.end_byte
        if at < end:
            yield self.between(node.text[at - base : end - base], quoted)

    def between(self, raw, quoted):
        text = _decoded(raw)
        return _Part(_unquoted(text) if quoted else _unescaped(text), (), not quoted)

    def rest(self, node, start):
        """The argument of a pattern operator as a word, None where it has quotes or escapes."""
        parts = list(self.inside(node, start, quoted=True))
        raw = _decoded(node.text[start - node.start_byte : -1])
        if re.search(r"[\"'\\]", raw):
            return None
        return Word("".join(p.text for p in parts), _names(parts))

    # Numbers

    def arithmetic(self, node):
        unknown, values = [], [0]
        for child in node.named_children:
            values.append(self.number(child, unknown))
        if unknown or values[-1] is None:
            return _hidden(_source(node), tuple(dict.fromkeys(unknown)) or (_source(node),))
        return _Part(str(values[-1]))

    def number_status(self, node):
        unknown = []
        values = [self.number(child, unknown) for child in node.named_children]
        for name in _assigned(node):
            self.mark(name, (name,))
        return None if unknown or not values or values[-1] is None else values[-1] != 0

    def number(self, node, unknown):
        """An integer of 64 bits, or None; names of what is missing are added to `unknown`."""
        self.step(node)
        kind, inner = node.type, node.named_children
        if kind == "parenthesized_expression" and len(inner) == 1:
            return self.number(inner[0], unknown)
        if kind == "unary_expression" and len(inner) == 1:
            value, sign = self.number(inner[0], unknown), node.children[0].type
            if value is None or sign not in UNARY:
                return None
            return _wrapped(UNARY[sign](value))
        if kind == "binary_expression":
            sign = node.child_by_field_name("operator").text.decode()
            one = self.number(node.child_by_field_name("left"), unknown)
            two = self.number(node.child_by_field_name("right"), unknown)
            if one is None or two is None or sign not in BINARY:
                return None
            if sign in ("/", "%") and two == 0:
                raise ValueError(f"line {_line(node)} divides by 0")
            if (sign == "**" and not 0 <= two < 64) or (sign in ("<<", ">>") and not 0 <= two < 64):
                return None
            return _wrapped(BINARY[sign](one, two))
        if kind == "ternary_expression" and len(inner) == 3:
            test, one, two = (self.number(child, unknown) for child in inner)
            return None if test is None else (one if test else two)
        if kind in ("variable_name", "word") and NAME.fullmatch(node.text.decode()):
            word = self.value(node.text.decode())
        elif kind in ("number", "word", *EXPANSIONS, "string", "concatenation"):
            word = self.single(node)
        else:
            unknown.append(_source(node))
            return None
        unknown += word.unknown
        if word.unknown:
            return None
        try:
            return _integer(word.text)
        except ValueError:
            unknown.append(_source(node))
            return None


EXPANSIONS = (
    "simple_expansion",
    "expansion",
    "command_substitution",
    "arithmetic_expansion",
    "process_substitution",
)
NUMERIC = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
UNARY = {
    "-": operator.neg,
    "+": operator.pos,
    "!": lambda a: int(a == 0),
    "~": operator.invert,
}
BINARY = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "%": lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    "**": operator.pow,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "&&": lambda a, b: int(a != 0 and b != 0),
    "||": lambda a, b: int(a != 0 or b != 0),
    "<": lambda a, b: int(a < b),
    "<=": lambda a, b: int(a <= b),
    ">": lambda a, b: int(a > b),
    ">=": lambda a, b: int(a >= b),
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
}


def _integer(text):
    text = text.strip()
    if not re.fullmatch(r"[-+]?(0[xX][0-9a-fA-F]{1,15}|\d{1,18})", text):
        raise ValueError(f"{text} is no integer")
    digits = text.lstrip("+-").lower()
    octal = len(digits) > 1 and digits[0] == "0" and digits[1] != "x"
    value = int(digits, 8 if octal else 0)
    return -value if text.startswith("-") else value


def _wrapped(value):
    """As 64 bits hold it."""
    return (value + 2**63) % 2**64 - 2**63


def _operate(text, sort, argument):
    """`${name%pattern}` and its like, None where it is not read."""
    if sort in (",,", "^^", ",", "^"):
        if argument:
            return None
        change = str.lower if sort[0] == "," else str.upper
        return change(text) if len(sort) == 2 else change(text[:1]) + text[1:]
    if sort in ("%", "%%", "#", "##"):
        lengths = range(len(text) + 1)
        if len(sort) == 2:
            lengths = reversed(lengths)
        for n in lengths:
            cut = text[len(text) - n :] if sort[0] == "%" else text[:n]
            if fnmatch.fnmatchcase(cut, argument):
                return text[: len(text) - n] if sort[0] == "%" else text[n:]
        return text
    if sort in ("/", "//"):
        old, _, new = argument.partition("/")
        if not old or re.search(r"[*?[&]", old + new):
            return None
        return text.replace(old, new, 1 if sort == "/" else -1)
    if sort == ":" and re.fullmatch(r"\d+(:\d+)?", argument):
        start, _, length = argument.partition(":")
        return text[int(start) :][: int(length) if length else None]
    return None


def _assigned(node):
    """Names that a statement may set."""
    names = []
    for inner in _walk(node):
        if inner.type in ("variable_assignment", "for_statement"):
            target = inner.child_by_field_name("name") or inner.child_by_field_name("variable")
            names += NAME.findall(target.text.decode())[:1]
        elif inner.type == "command":
            name = inner.child_by_field_name("name")
            if name is not None and name.text.decode() in (*READS, "printf", "let"):
                names += NAME.findall(inner.text.decode())[1:]
        elif inner.type in ("postfix_expression", "unary_expression"):
            if any(c.type in ("++", "--") for c in inner.children):
                names += NAME.findall(inner.text.decode())[:1]
        elif inner.type == "binary_expression":
            sign = inner.child_by_field_name("operator")
            if sign is not None and re.fullmatch(rb"[-+*/%&|^]=|<<=|>>=", sign.text):
                names += NAME.findall(inner.text.decode())[:1]
    return tuple(dict.fromkeys(names))


def _has_and_or(node):
    return any(n.type == "test_operator" and n.text in (b"-a", b"-o") for n in _walk(node))


def _unknown(value):
    if value is None or value == UNSET:
        return ()
    words = [value] if isinstance(value, Word) else value
    return tuple(dict.fromkeys(u for w in words for u in w.unknown))


def _hidden(source, unknown, loose=False):
    """A piece that only a run would tell."""
    return _Part("$" + re.sub(r"\s+", "", source).lstrip("$"), tuple(unknown), loose)


def _names(parts):
    return tuple(dict.fromkeys(u for p in parts for u in p.unknown))


def _joined(word, text, unknown):
    if word is None:
        return Word(text, tuple(unknown))
    return Word(word.text + text, tuple(dict.fromkeys((*word.unknown, *unknown))))


def _between(one, two):
    """Whether two nodes stand apart."""
    if one.end_byte > two.start_byte:
        return True
    parent = one.parent
    while parent is not None and parent.end_byte < two.end_byte:
        parent = parent.parent
    if parent is None:
        return True
    base = parent.start_byte
    gap = parent.text[one.end_byte - base : two.start_byte - base]
    return gap.replace(b"\\\n", b"") != b""


def _decoded(raw):
    return raw.decode(errors="surrogatepass")


def _source(node, whole=False):
    text = _decoded(node.text)
    return text if whole else short(text)


def _unescaped(text):
    """Text outside quotes: a backslash keeps the next character, and swallows a line's end."""
    return re.sub(r"\\(\n|.)", lambda m: "" if m[1] == "\n" else m[1], text, flags=re.DOTALL)


def _unquoted(text):
    """Text inside double quotes, where a backslash escapes these alone."""
    return re.sub(r'\\([$`"\\\n])', lambda m: "" if m[1] == "\n" else m[1], text)
