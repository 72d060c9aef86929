"""GBNF grammars: the same language as a reference reader accepts, whether written as lexemes or as characters."""

import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dragoman.core.errors import InvalidSchema
from dragoman.core.request import GenerationRequest, Grammar
from dragoman.formats import FORMATS
from dragoman.grammar import gbnf
from dragoman.grammar.gbnf import Alternatives, Chars, Concatenation, Node, RuleRef
from dragoman.grammar.gbnf_lark import gbnf_to_lark
from dragoman.grammar.reply_grammar import build_reply_grammar
from tests.grammar.matching import Matcher, grammar_model, tokens

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
"""As published with llama.cpp, with an exponent of any digits."""


class Reference:
    """Finds the ends of a rule from every position until nothing new is found, so recursion may be of any kind."""

    def __init__(self, rules: dict[str, Node], text: str) -> None:
        self.rules, self.text = rules, text
        self.found: dict[tuple[str, int], set[int]] = {
            (name, at): set() for name in rules for at in range(len(text) + 1)
        }

    def accepts(self) -> bool:
        is_stable = False
        while not is_stable:
            is_stable = True
            for (name, at), ends in self.found.items():
                new = self.ends(self.rules[name], at) - ends
                ends |= new
                is_stable = is_stable and not new
        return len(self.text) in self.found[gbnf.ROOT, 0]

    def ends(self, node: Node, at: int) -> set[int]:
        if isinstance(node, Chars):
            code = ord(self.text[at]) if at < len(self.text) else -1
            return {at + 1} if any(low <= code <= high for low, high in node.ranges) else set()
        if isinstance(node, RuleRef):
            return set(self.found[node.name, at])
        if isinstance(node, Alternatives):
            return set().union(*(self.ends(option, at) for option in node.options))
        if isinstance(node, Concatenation):
            current = {at}
            for item in node.items:
                current = set().union(*(self.ends(item, start) for start in current))
            return current
        most = node.least + len(self.text) + 1 if node.most is None else node.most
        current, reached = {at}, {at} if not node.least else set()
        for count in range(1, most + 1):
            current = set().union(*(self.ends(node.item, start) for start in current))
            reached |= current if count >= node.least else set()
        return reached


def elements(depth: int) -> Any:
    simple = st.sampled_from(['"a"', '"b"', '"ab"', "[ab]", "[^a]", "other", "third", '""'])
    if not depth:
        return simple
    inner = options(depth - 1).map("({})".format)
    repeated = st.tuples(simple | inner, st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}"])).map("".join)
    return simple | repeated | inner


def options(depth: int) -> Any:
    sequence = st.lists(elements(depth), max_size=3).map(" ".join)
    return st.lists(sequence, min_size=1, max_size=3).map(" | ".join)


GRAMMARS = st.tuples(options(2), options(1), options(1)).map(
    lambda rules: "root ::= {}\nother ::= {}\nthird ::= {}".format(*rules)
)
TEXTS = ["".join(letters) for length in range(5) for letters in itertools.product("ab", repeat=length)]
RULES = "\nother ::= {}\nthird ::= {}"


@settings(max_examples=60, deadline=None)
@given(grammar=GRAMMARS)
@example(grammar="root ::= other other | third" + RULES.format('[ab]+ "b"', '"a" third "b" | ""'))
@example(grammar="root ::= other third" + RULES.format('"a"*', '"a" third "b" | "b"'))
@example(grammar="root ::= third" + RULES.format('("a" | "ab")', 'third other | "b"'))
@example(grammar="root ::= third" + RULES.format('("a"{2}){0,2}', '"b" third "b" | other'))
def test_language_is_that_of_the_reference(grammar: str) -> None:
    rules = gbnf.parse(grammar, "grammar")
    expected = [text for text in TEXTS if Reference(rules, text).accepts()]
    written = gbnf_to_lark(grammar, "grammar")
    try:
        reader = Matcher(written)
        found = [text for text in TEXTS if reader.accepts(text)]
    except InvalidSchema:
        # llguidance refuses a grammar without any reply.
        found = []
    assert found == expected


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("{}", True),
        ('{"a": [1, -2.50e+10, {"b": "x\\u00e9é😀"}], "c": null}', True),
        ('{"a": {\n \t"b": []}}', True),
        ('{"a"}', False),
        ('{"a": 1,}', False),
        ("[]", False),
        ('{"a": "\n"}', False),
    ],
)
def test_json_grammar_of_llama_cpp(text: str, is_valid: bool) -> None:
    written = gbnf_to_lark(JSON, "grammar")
    assert "LEXEME" in written
    assert Matcher(written).accepts(text) == is_valid


CHARACTERS = [
    (r'root ::= "\x41\u00e9\U0001F600\n\"\\"', 'Aé😀\n"\\', True),
    ("root ::= [^\\]a-c-]", "-", False),
    ("root ::= [^\\]a-c-]", "é", True),
    ("root ::= [\\]a\\-c]{3}", "]-c", True),
    ("root ::= [\\]a\\-c]", "b", False),
    ("root ::= . .", "\n😀", True),
    (r'root ::= "\/\'\?\b\f\a\v\0\e"', "/'?\b\f\a\v\0\x1b", True),
    (r"root ::= [\^\$\.\*\+\(\)\{\}\|]{10}", "^$.*+(){}|", True),
    ("root ::= [^] ( )", "\n", True),
    ("# about\nroot::=one-two # more\none-two ::= \"a\" |\n  'b'".replace("'", '"'), "b", True),
]


@pytest.mark.parametrize(("grammar", "text", "is_valid"), CHARACTERS)
def test_characters_and_classes(grammar: str, text: str, is_valid: bool) -> None:
    assert Matcher(gbnf_to_lark(grammar, "grammar")).accepts(text) == is_valid


INVALID = [
    ('rule ::= "a"', "there is no rule 'root'"),
    ("root ::= other", "rule 'other' is not defined"),
    ('root ::= "a"\nroot ::= "b"', "rule 'root' is defined twice"),
    ('root ::= ("a"', "parenthesis is missing"),
    ('root ::= "a', "in line 1"),
    ("root ::= [z-a]", "the range z-a is empty"),
    ("root ::= []", "allows no character"),
    (r'root ::= "\q"', "unknown escape"),
    (r"root ::= [\d]", "unknown escape"),
    ('root ::= TagDispatch(("<a>", rule))\nrule ::= "b"', "unexpected ', rule"),
    ("root ::= Token(12)", "rule 'Token' is not defined"),
    ('root ::= a (="b")\na ::= "c"', 'unexpected \'="b")'),
    ('root ::= a\na[temperature=0.7] ::= "c"', "'::=' must follow the name"),
    ("root ::= <think>", "control tokens such as '<think>'"),
    ("root ::= " + "(" * 100, "nested deeper"),
    ('root ::= "a"{3,2}', "repeats at most less"),
    (r'root ::= "\uD800"', "is not a character"),
]


@pytest.mark.parametrize(("grammar", "problem"), INVALID)
def test_invalid_grammar_is_explained(grammar: str, problem: str) -> None:
    with pytest.raises(InvalidSchema, match=r"^grammar: invalid GBNF: ") as raised:
        gbnf_to_lark(grammar, "grammar")
    assert problem in raised.value.message
    assert raised.value.param == "grammar"


def test_form_decides_about_the_syntax() -> None:
    assert not gbnf.is_gbnf('start: "a::=b" | other\nother: /x/')
    for text in ('root ::= "a" "b"', 'start: "a" "b"'):
        reply = build_reply_grammar(
            GenerationRequest(prompts=("x",), constraint=Grammar(text)), grammar_model(FORMATS["plain"]), begins="reply"
        )
        assert reply is not None
        reader = Matcher(reply.grammar).matcher
        assert reader.try_consume_tokens(tokens("ab")) == 2
        assert reader.is_accepting()
