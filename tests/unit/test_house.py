"""The house rules of CONTRIBUTING.md that a program can check: names, sizes, prose, and the map."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from holdwater.testing.leaks import SCOPED

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/holdwater"
MODULES = [path for path in sorted(SOURCE.rglob("*.py")) if "demo/tasks" not in path.as_posix()]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]

Function = ast.FunctionDef | ast.AsyncFunctionDef
PARTICIPLES = """
answered asked begun built called checked chosen closed copied counted cut_off decoded described done
dropped ended failed fetched filled followed found given gone grown heard held joined judged kept known
leased left listed lost made marked measured meant merged named needed opened ordered paid parsed planned
put_back quoted read_out refused renamed reported resolved returned said saved seen sent served settled
shared shown spoken started taken thrown told tried used wanted watched written
"""
# Adjectives, participles, adverbs and riddles: a module is named by a noun that a newcomer would guess.
REFUSED_MODULES = """
asked behind beneath book brood chosen customers desk dock door entrance foreign guests held hurt latest
life marks near omitted place places published raw remains shelter side speech spoken squeeze standing
story stock survey told together traces wanted warmth whole written
"""
RIDDLES = re.compile(r"\b(what is|whoever|nobody|told)\b", re.IGNORECASE)
MOST_RIDDLES = 5.0  # for each 10,000 words
LEAST_MODULE_LINES = 185  # on average
# More than five methods: each is one object that users or workers see whole.
LARGE_PROTOCOLS = {
    "ImageSupply": "a hold of images and places, from its announcement to its end, and that of its group",
    "Model": "four facts for clients, the name for side calls, and the call itself",
    "ManagedSandbox": "a sandbox as an attempt manages it; agents and suites see its smaller bases",
    "SessionStatus": "read-only counters of a gateway session",
}

# Objects of `run/` are complete after their constructor: none gets attributes from another module.
FOREIGN_ATTRIBUTES = {
    "builds/docker_supply.py: failure.after": "an error that the function has just made by another one",
}


class ClassFacts(NamedTuple):
    name: str
    place: str
    methods: int
    is_protocol: bool


class FunctionFacts(NamedTuple):
    name: str
    place: str
    lines: int
    states: bool  # a property, or a function that returns a bool: it may be named by a statement


class HouseFacts(NamedTuple):
    """Facts about all modules. The syntax trees themselves would take 150 MB of each test process."""

    classes: list[ClassFacts]
    functions: list[FunctionFacts]
    openings: dict[str, str]  # module -> the first paragraph of its docstring
    words: int  # of docstrings and comments
    riddles: list[str]


@pytest.fixture(scope="module")
def house() -> HouseFacts:
    facts = HouseFacts([], [], {}, 0, [])
    for path in MODULES:
        text = path.read_text()
        name = path.relative_to(ROOT).as_posix()
        prose = [found.string for found in read_comments(text)]
        tree = ast.parse(text)
        facts.openings[name] = (ast.get_docstring(tree) or "").split("\n\n")[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | Function):
                prose.append(ast.get_docstring(node) or "")
            if isinstance(node, ast.ClassDef):
                facts.classes.append(describe_class(node, name))
            elif isinstance(node, Function):
                facts.functions.append(describe_function(node, name))
        facts.riddles.extend(match[0] for text in prose for match in RIDDLES.finditer(text))
        facts = facts._replace(words=facts.words + sum(len(text.split()) for text in prose))
    return facts


def read_comments(text: str) -> Iterator[tokenize.TokenInfo]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return (token for token in tokens if token.type == tokenize.COMMENT)


def describe_class(node: ast.ClassDef, name: str) -> ClassFacts:
    methods = sum(isinstance(part, Function) for part in node.body)
    is_protocol = any(getattr(base, "id", "") == "Protocol" for base in node.bases)
    return ClassFacts(node.name, f"{name}:{node.lineno}", methods, is_protocol)


def describe_function(node: Function, name: str) -> FunctionFacts:
    decorators = {getattr(mark, "id", getattr(mark, "attr", "")) for mark in node.decorator_list}
    states = bool(decorators & {"property", "cached_property"}) or getattr(node.returns, "id", "") == "bool"
    return FunctionFacts(node.name, f"{name}:{node.lineno}", (node.end_lineno or 0) - node.lineno + 1, states)


def glossary() -> list[str]:
    words = (ROOT / "ARCHITECTURE.md").read_text().split("## Words")[1].split("\n## ")[0]
    return re.findall(r"^\| (\w+) \|", words, re.MULTILINE)[1:]


def test_the_glossary_is_short_and_has_no_word_twice() -> None:
    words = glossary()

    assert 10 < len(words) <= 30
    assert [word for word, count in Counter(words).items() if count > 1] == []


def test_no_public_class_name_has_two_meanings(house: HouseFacts) -> None:
    homes = defaultdict(set)
    for found in house.classes:
        if not found.name.startswith("_"):
            homes[found.name].add(found.place.split(":")[0])

    assert {name: sorted(paths) for name, paths in homes.items() if len(paths) > 1} == {}


def test_class_names_have_two_words_or_are_in_the_glossary(house: HouseFacts) -> None:
    names = [found.name.lstrip("_") for found in house.classes]
    known = set(glossary())
    clear = [name for name in names if name in known or len(re.findall("[A-Z][a-z0-9]*", name)) > 1]

    assert len(clear) >= 0.9 * len(names)


def test_functions_are_named_by_verbs(house: HouseFacts) -> None:
    named = [
        found
        for found in house.functions
        if found.name.strip("_") in PARTICIPLES.split() and not found.states
    ]
    private = [found for found in named if found.name.startswith("_")]

    assert [found for found in named if found not in private] == []
    assert len(private) < 0.02 * len(house.functions), private


def test_modules_are_named_by_nouns() -> None:
    assert [str(path) for path in MODULES if path.stem in REFUSED_MODULES.split()] == []


def test_protocols_are_small(house: HouseFacts) -> None:
    assert {found.name for found in house.classes if found.is_protocol and found.methods > 5} == set(
        LARGE_PROTOCOLS
    )


def test_no_module_of_run_sets_attributes_of_objects_of_another() -> None:
    found = {name for path in (SOURCE / "run").rglob("*.py") for name in find_foreign_attributes(path)}

    assert found == set(FOREIGN_ATTRIBUTES)


def find_foreign_attributes(path: Path) -> Iterator[str]:
    """Find assignments to attributes of objects that are not `self`, of an own class, or just made."""
    tree = ast.parse(path.read_text())
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own = {name for node in classes for name in list_attributes(node)}
    for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
        known = {"self", *list_new_objects(function)}
        for target in ast.walk(function):
            if not isinstance(target, ast.Attribute) or not isinstance(target.ctx, ast.Store):
                continue
            owner = getattr(target.value, "id", "")
            if owner not in known and (target.attr not in own or not owner):
                yield f"{path.relative_to(SOURCE / 'run')}: {ast.unparse(target)}"


def list_attributes(node: ast.ClassDef) -> Iterator[str]:
    """Yield the attributes that a class declares, or sets on `self`."""
    for part in ast.walk(node):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id
        elif isinstance(part, ast.Attribute) and getattr(part.value, "id", "") == "self":
            yield part.attr


def list_new_objects(function: Function) -> Iterator[str]:
    """Yield the names to which a function assigns a call of a class."""
    for node in ast.walk(function):
        made = node.value if isinstance(node, ast.Assign) else None
        if isinstance(made, ast.Call) and getattr(made.func, "id", "_")[0].isupper():
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def test_modules_are_large_enough_to_be_worth_opening() -> None:
    """A tree that is cut finer is searched rather than read. Empty `__init__` modules do not count."""
    sizes = [size for path in MODULES if (size := len(path.read_text().splitlines())) > 1]

    assert sum(sizes) / len(sizes) >= LEAST_MODULE_LINES


def test_modules_have_at_most_400_lines() -> None:
    long = {path: len(path.read_text().splitlines()) for path in MODULES}

    assert [f"{path.relative_to(ROOT)}: {lines}" for path, lines in long.items() if lines > 400] == []


def test_functions_have_at_most_50_lines(house: HouseFacts) -> None:
    assert [found for found in house.functions if found.lines > 50] == []


def test_every_module_opens_with_one_to_three_sentences(house: HouseFacts) -> None:
    odd = {
        name: text
        for name, text in house.openings.items()
        if not 1 <= len(re.findall(r"\.(?:\s|$)", text)) <= 3
    }

    assert odd == {}


def test_prose_names_its_nouns(house: HouseFacts) -> None:
    pages = [page.read_text() for page in PAGES if page.name != "CHANGELOG.md"]
    riddles = house.riddles + [match[0] for page in pages for match in RIDDLES.finditer(page)]
    words = house.words + sum(len(page.split()) for page in pages)

    assert len(riddles) / words * 10_000 < MOST_RIDDLES, Counter(riddles)


def test_the_map_is_short_and_names_modules_that_exist() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    drawn = re.findall(
        r"^ *((?:\w+/)+\w+)(?:  |\s*$)", "\n".join(re.findall("```\n(.*?)```", page, re.DOTALL)), re.M
    )
    named = re.findall(r"`((?:\w+/)+\w+)\.py`", page)

    assert len(page.splitlines()) <= 250
    assert len(drawn) > 15 and len(named) > 30
    assert [name for name in (*drawn, *named) if not (SOURCE / f"{name}.py").exists()] == []


@pytest.mark.parametrize("folder", ["unit", "live", "fault", "docker"])
def test_names_of_tests_have_at_most_12_words(folder: str) -> None:
    long = []
    for path in sorted((ROOT / "tests" / folder).glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Function) and len(re.findall("_+[a-z0-9]+", node.name)) > 12:
                long += [f"{path.name}:{node.lineno} {node.name}"] if node.name.startswith("test_") else []

    assert long == []


def test_the_leak_check_names_classes_that_exist() -> None:
    """A class that was moved would otherwise leave the check in silence."""
    homes = [name.rpartition(".") for name in SCOPED]

    assert [name for module, _, name in homes if not hasattr(import_module(module), name)] == []
