"""The reader of shell scripts, against bash itself and by cases."""

import os
import re
import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpnorm import shell

BASH = shutil.which("bash")
RUN = "python3 -m verl.trainer.main_ppo"
STUB = 'python3() { printf "%s\\0" "$@"; printf "\\1\\0"; }\n'
"""In place of python: its words, each with a zero behind it, and a mark behind the last."""


def launches(text, **given):
    """Words behind the module of each launch, and what their values hang on."""
    found = shell.read(text, given).launches
    return [
        (
            [w.text for w in one.words[3:]],
            {*one.unknown, *(n for w in one.words for n in w.unknown)},
        )
        for one in found
    ]


def words(text, **given):
    """Words of the one launch of a script, all of them known."""
    ((found, unknown),) = launches(text, **given)
    assert not unknown
    return found


# Against bash


def one(*texts):
    return st.sampled_from(texts)


def joined(part, least, most, between=" "):
    return st.lists(part, min_size=least, max_size=most).map(between.join)


NAME = one("A", "B", "C")
INNER = one("d", "d-e", "", "$B", "${C}", "x$C", "a/b", "[1,2]")
IN_QUOTES = st.one_of(INNER, one("d e", "${B:-d e}", "'d'"))
PATTERN = one("a", "?", "a*", "*b", "*/", "/*", "*.")


def built(text, *parts):
    """Scripts made of drawn parts, in place of each `@`."""
    pieces = text.split("@")
    return st.tuples(*parts).map(
        lambda drawn: "".join(a + b for a, b in zip(pieces, (*drawn, ""), strict=True))
    )


def of_variables(inner):
    return st.one_of(
        built("${@}", NAME),
        built("$@/$@/$@=", NAME, NAME, NAME),
        built("${@@@}", NAME, one(":-", "-", ":+", "+", ":="), inner),
        built("${@@@}", NAME, one("#", "##", "%", "%%"), PATTERN),
        built("${@@@/@}", NAME, one("/", "//"), one("a", "b"), one("", "r")),
        built("${#@}", NAME),
        built("$(( @ @ @ ))", one("I", "$I", "2"), one("+", "-", "*", "/", "%"), one("J", "3")),
    )


def expansions(inner):
    """Of a variable, an array, the script's parameters, or a sum."""
    return st.one_of(
        of_variables(inner),
        one("${L[@]}", "${#L[@]}", "${L[0]}", "${#}", "${@}", "${@:2}", "${L[@]:1}", "${1:-p}"),
    )


PIECE = st.one_of(
    one("a", "b1", "x=1", "a.b=2", "+k.j=3", "~k", "0", "a/b.c", "[1,2]", "{x:1}", "-5", "a:b"),
    one('"${L[@]}"', "'a b'", "'$A'", '\'["console","wandb"]\'', "a\\ b", '\\"', "$'t\\tx'", '""'),
    expansions(INNER),
    joined(st.one_of(one("a", " ", "'", '\\"', "\\$", "="), of_variables(IN_QUOTES)), 0, 3, "").map(
        lambda text: f'"{text}"'
    ),
)
WORD = st.one_of(built("$@", NAME), joined(PIECE, 1, 3, ""))
WORDS = joined(WORD, 0, 3)
LAUNCH = built(
    f"@{RUN} @@",
    one("", "X=1 "),
    joined(WORD, 1, 4, " \\\n  "),
    one("", " # note", " 2>&1", " || true", " \\\n  c=3 \\\n "),
)
CONDITION = st.one_of(
    built('[ @ "@" ]', one("-z", "-n"), of_variables(IN_QUOTES)),
    built('[[ "@" @ @ ]]', of_variables(IN_QUOTES), one("=", "==", "!="), INNER),
    built("[ $I @ @ ]", one("-eq", "-ne", "-lt", "-ge"), one("0", "1", "2")),
    one("true", "false", "! true", "[ $# -gt 1 ]", "(( I > J ))", '[[ -n "$A" && "$B" != a* ]]'),
)
ASSIGNMENT = st.one_of(
    built("@@@", NAME, one("=", "=", "+="), WORD),
    built("@@)", one("L=(", "L+=("), WORDS),
    built("export @=@", NAME, WORD),
    built(": ${@:=@}", NAME, INNER),
    one("I=$((I + 1))", "J=$((J * 2))", "shift", "unset A", "A=\\\nb"),
    one('L=("$@")', 'L+=("${L[@]}" x)', 'A="$*"', 'set -- "$@" z', ": <<'EOF'\n$X \" '\nEOF"),
)


def block(depth):
    return joined(st.deferred(lambda: statement(depth - 1)), 1, 2, "\n")


def statement(depth):
    if depth < 0:
        return st.one_of(ASSIGNMENT, LAUNCH)
    inside = block(depth)
    return st.one_of(
        ASSIGNMENT,
        LAUNCH,
        built("if @; then\n@\nelif @; then\n@\nelse\n@\nfi", *[CONDITION, inside] * 2, inside),
        built("case @ in\n@) @ ;;\n*) @ ;;\nesac", WORD, one("a*", "b1|x*"), inside, inside),
        built("for v in @; do\nA=$v\n@\ndone", joined(WORD, 1, 3), inside),
        built("f() {\nlocal B=$1\n@\n}\nf @", inside, WORDS),
        built("@ @ {\n@\n}", CONDITION, one("&&", "||"), inside),
        built("(\n@\n)", inside),
        built("n=0\nwhile [ $n -lt 2 ]; do n=$((n+1))\n@\ndone", inside),
    )


SCRIPT = built(
    "unset A B C L v n\nI=1 J=2\nset -- @\nL=(@)\nA=@\nB=@\n@\n@\n",
    WORDS,
    WORDS,
    WORD,
    WORD,
    joined(statement(1), 1, 4, "\n"),
    LAUNCH,
)


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    """Runs a script where there is no command but the stub, and gives the words of each run."""
    folder = tmp_path_factory.mktemp("bash")
    (folder / "stub").write_text(STUB)
    env = {
        "PATH": "",
        "BASH_ENV": str(folder / "stub"),
        "LC_ALL": os.environ.get("LC_ALL", "C.UTF-8"),
    }

    def run(text):
        (folder / "script").write_text(text)
        command = [BASH, "script"]
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, timeout=20, check=False
        )
        runs = done.stdout.decode().split("\1\0")[:-1]
        return [one.split("\0")[2:-1] for one in runs], done.stderr.decode()

    return run


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=SCRIPT)
def test_words_are_those_of_bash(bash, text):
    """A word that the reader takes for known is bash's, and every launch of bash's is found."""
    theirs, error = bash(text)
    if error:  # such as a division by zero: bash leaves the script
        return
    ours = launches(text)
    assert not any(unknown for _, unknown in ours)
    assert sorted(found for found, _ in ours) == sorted(theirs)


# By cases


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"{RUN} a=1 \\\n  b=2 \\\n# note\n", ["a=1", "b=2"]),
        (f"N=${{N:-2}}\n{RUN} a=$N\n", ["a=2"]),
        (f"M=${{M:-$((1024 * 3))}}\n{RUN} a=$M\n", ["a=3072"]),
        (f"A=(a=1\n  b=2 # note\n  'c=[x]')\nA+=(d)\n{RUN} \"${{A[@]}}\"\n", ["a=1", "b=2", "c=[x]", "d"]),  # noqa: E501
        (f"A=({RUN} x=1)\n\"${{A[@]}}\" y=2 > log 2>&1 &\nwait\n", ["x=1", "y=2"]),
        (f"run() {{ {RUN} \"$@\"; }}\nrun a=1 'b=x y'\n", ["a=1", "b=x y"]),
        (f"case ${{D:-gpu}} in npu) B=1 ;; gpu|cuda) B=2 ;; esac\n{RUN} b=$B\n", ["b=2"]),
        (f"X='[\"a\",\"b\"]'\n{RUN} l=$X '+k={{a:1}}' ~d\n", ['l=["a","b"]', "+k={a:1}", "~d"]),
        (f"bash -c '{RUN} a=1'\n", ["a=1"]),
        (f"srun --nodes 2 bash -lc \"{RUN} a=1\"\n", ["a=1"]),
        (f"ssh host '{RUN} a=1'\n", ["a=1"]),
        (f"C=\"{RUN} a=1\"\neval \"$C b=2\"\n", ["a=1", "b=2"]),
        (f"bash -s <<EOF\n{RUN} a=1\nEOF\n", ["a=1"]),
        (f"cd /w && pip install x && {RUN} a=1\n", ["a=1"]),
        (f"ray start || exit 1\n{RUN} a=1 | tee log\n", ["a=1"]),
        (f"while true; do\nif ray status; then break; fi\nsleep 5\ndone\n{RUN} a=1\n", ["a=1"]),
        (f"A=${{A:-[\"/x\"]}}\n{RUN} a=$A\n", ["a=[/x]"]),
        (f"{RUN} a=1 \\\n", ["a=1"]),
        (f"{RUN} a=1 \\", ["a=1"]),
        (f"x=1 y=2\nA=$x/$y/$x\n{RUN} a=$A $x/$y/$x\n", ["a=1/2/1", "1/2/1"]),
        (f"x=1 y=2\nexport B=$x/$y/$x\n{RUN} $B\n", ["1/2/1"]),
        (f"I=1 J=2\n{RUN} a=$I$J\n", ["a=12"]),
        ("accelerate launch -m verl.trainer.main_ppo a=1\n", ["verl.trainer.main_ppo", "a=1"]),
        (f"if [ -z \"$1\" ]; then :; fi\nset -x\n{RUN} a=1\n", ["a=1"]),
        (f"B=\"${{B:-'d'}}\"\n{RUN} a=$B\n", ["a='d'"]),
    ],
)  # fmt: skip
def test_what_launch_scripts_do(script, expected):
    assert words(script) == expected


def test_lines_and_several_launches():
    found = shell.read(f"A=1\n{RUN} a=$A\n\n{RUN} a=2\n").launches
    assert [one.line for one in found] == [2, 4]


def test_variables_that_are_given():
    script = f'N=${{NNODES:-1}}\n{RUN} n=$N m=${{MODEL}} p=$1 q=${{2:-z}} "${{@:3}}"\n'
    assert words(script, **{"NNODES": "4", "MODEL": "/m", "1": "x"}) == [
        "n=4",
        "m=/m",
        "p=x",
        "q=z",
    ]
    ((found, unknown),) = launches(script)
    assert unknown == {"MODEL", "1"}
    assert found[0] == "n=1"
    assert {"NNODES", "MODEL", "N"} <= shell.read(script).variables


def test_a_given_variable_that_the_script_overwrites():
    assert shell.read(f"CP=2\n{RUN} a=$CP\n", {"CP": "4"}).overwritten == {"CP": 1}
    kept = f"CP=${{CP:-2}}\nTP=$((TP * 2))\n{RUN} a=$CP$TP\n"
    script = shell.read(kept, {"CP": "4", "TP": "1"})
    assert script.overwritten == {}
    assert script.launches[0].words[-1].text == "a=42"


def test_a_script_that_ends_before_its_launch():
    usage = f"if [ $# -lt 1 ]; then\necho usage\nexit 1\nfi\n{RUN} m=$1\n"
    assert shell.read(usage).ended == 3
    assert shell.read(usage).launches == ()
    assert words(usage, **{"1": "/m"}) == ["m=/m"]


@pytest.mark.parametrize(
    ("script", "unknown"),
    [
        (f"{RUN} a=$X\n", {"X"}),
        (f"A=$(nproc)\n{RUN} a=$A\n", {"A"}),
        (f"{RUN} a=$(nproc)\n", {"'$(nproc)'"}),
        (f"{RUN} a=$RANDOM\n", {"RANDOM"}),
        (f"if [ -f /x ]; then A=1; else A=2; fi\n{RUN} a=$A\n", {"'[ -f /x ]'"}),
        (f"if [ \"$X\" = 1 ]; then A=1; else A=2; fi\n{RUN} a=$A\n", {"X"}),
        (f"A=(x=1)\nif [ -f /x ]; then A+=(y=2); fi\n{RUN} \"${{A[@]}}\"\n", {"'[ -f /x ]'"}),
        (f"read A\n{RUN} a=$A\n", {"A"}),
        (f"if [ \"$RANK\" = 0 ]; then {RUN} a=1; fi\n", {"RANK"}),
        (f"cat words | xargs {RUN}\n", {"what xargs reads"}),
        (f"{RUN} x{{1,2}}\n", {"'x{1,2}'"}),
        (f"A=1\nsource ./more.sh\n{RUN} a=${{B:-2}}\n", {"B"}),
    ],
)  # fmt: skip
def test_what_only_a_run_would_tell(script, unknown):
    ((_, found),) = launches(script)
    assert found == unknown


def test_both_arms_that_agree_are_known():
    assert words(f"if [ -f /x ]; then A=1; else A=1; fi\n{RUN} a=$A\n") == ["a=1"]


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (f"{RUN} a=1 \\ \n  b=2\n", "line 1 ends in a backslash and a blank"),
        (f"{RUN} a=1 \\\r\n  b=2\r\n", "Windows line ends"),
        (f"A=\"\"\\$B\n{RUN} a=$A\n", "line 1 cannot be read as bash"),
        (f"{RUN} a='1\n", "cannot be read as bash"),
        (f"A=(1 2\n{RUN}\n", "cannot be read as bash"),
        ("x" * (shell.LARGEST + 1), f"allowed are {shell.LARGEST}"),
        ("while true; do A=1; done\n", f"allowed are {shell.STEPS} steps"),
        ("A=x\n" + "A=$A$A\n" * 40, f"grows beyond {shell.LARGEST} characters"),
        ("f() { f; }\nf\n", f"allowed is {shell.DEEPEST}"),
        ("A=$((1))\n" + "(" * 20_000 + ")" * 20_000, "line"),
        (f"eval 'eval \"$A\"'\n{'if true; then ' * 5000}:{'; fi' * 5000}\n", "nested too deeply"),
    ],
)  # fmt: skip
def test_bounds_and_what_bash_would_not_run(script, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        shell.read(script)
