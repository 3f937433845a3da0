"""A flow consists of stages, which are plain functions, and of collections between the stages. A runner executes it.

    flow = Flow()
    raw = flow.create("Parts", range(3)).flat_map("Read", read_part, plan)
    parsed = raw.group("By block").map("Parse", parse_block, plan)

Workers receive a function by name, so a function must be defined at the top level of a module. A function returns small
elements, such as locations of bulk data (`pipelines.common.exchange`), instead of rows. The operator `+` merges
collections.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

MAIN = "main"  # tag of elements that are yielded without a tag

Elements = list[Any]
Outputs = dict[str, Elements]  # outputs of a stage, by tag
WorkKind = Literal["map", "flat_map", "map_partitions"]  # how a function gets elements: see `Work`


class Tagged(NamedTuple):
    """An element for a collection other than the main collection."""

    tag: str
    value: Any


class Output(NamedTuple):
    """One output, by tag, of the stage with the number `stage`."""

    stage: int
    tag: str


@dataclass(frozen=True)
class Work:
    """A function to apply to elements: `map` and `flat_map` pass one element per call, `map_partitions` passes several.

    With `map`, the function returns one element; with `flat_map` and `map_partitions`, the function yields elements.
    arguments: additional arguments, passed after the element.
    """

    kind: WorkKind
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    def __call__(self, elements: Iterable[Any]) -> Iterator[Any]:
        """Yield the results of the function for `elements`."""
        if self.kind == "map_partitions":
            yield from self.function(elements, *self.arguments)
            return
        for element in elements:
            made = self.function(element, *self.arguments)
            if self.kind == "map":
                yield made
            else:
                yield from made


@dataclass(frozen=True)
class Stage:
    """A stage of a flow: given elements, a function over the elements of `reads`, or these elements grouped by key.

    sides: maps argument positions of the work to outputs that contain (key, value) pairs. The function receives the
    pairs as dictionaries at these positions.
    """

    name: str
    reads: tuple[Output, ...] = ()
    given: Sequence[Any] | None = None
    work: Work | None = None  # a stage with neither given elements nor work is a grouping
    tags: tuple[str, ...] = (MAIN,)
    sides: Mapping[int, tuple[Output, ...]] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[Output, ...]:
        """All outputs that the stage reads."""
        return (*self.reads, *(output for outputs in self.sides.values() for output in outputs))

    def with_sides(self, dictionaries: Mapping[int, Mapping[Any, Any]]) -> Work:
        """Return the work with `dictionaries` inserted as arguments at the positions in `sides`."""
        assert self.work is not None
        arguments = [dictionaries.get(place, argument) for place, argument in enumerate(self.work.arguments)]
        return Work(self.work.kind, self.work.function, tuple(arguments))


class Flow:
    """Stages, in an order in which a runner can execute them."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []

    def create(self, name: str, elements: Iterable[Any]) -> "Collection":
        """Add elements that are known in advance; the runner distributes the elements over the workers."""
        return self.add(Stage(name, given=list(elements)))[MAIN]

    def add(self, stage: Stage) -> "dict[str, Collection]":
        """Add a stage. Returns the stage's collections by tag."""
        self.stages.append(stage)
        return {tag: Collection(self, (Output(len(self.stages) - 1, tag),)) for tag in stage.tags}

    def join(self, name: str, sides: "Mapping[str, Collection]") -> "Collection":
        """Group the (key, value) pairs of several collections by key into (key, {collection name: values})."""
        tagged = [side.map(f"{name}: {tag}", _tag_value, tag) for tag, side in sides.items()]
        return flatten(tagged).group(name).map(f"{name}: together", _values_by_tag, tuple(sides))


@dataclass(frozen=True)
class Collection:
    """Elements that stages of a flow produce, in no particular order."""

    flow: Flow
    outputs: tuple[Output, ...]

    def __add__(self, other: "Collection") -> "Collection":
        return Collection(self.flow, self.outputs + other.outputs)

    def map(self, name: str, function: Callable[..., Any], *arguments: Any) -> "Collection":
        """Call `function(element, *arguments)`, which returns one element. Collections become dictionaries."""
        return self._add(name, "map", function, arguments)[MAIN]

    def flat_map(self, name: str, function: Callable[..., Any], *arguments: Any) -> "Collection":
        """Call `function(element, *arguments)`, which yields elements."""
        return self._add(name, "flat_map", function, arguments)[MAIN]

    def map_partitions(self, name: str, function: Callable[..., Any], *arguments: Any) -> "Collection":
        """Call `function(elements, *arguments)`, which takes several elements at a time and yields elements."""
        return self._add(name, "map_partitions", function, arguments)[MAIN]

    def split(
        self, name: str, tags: Sequence[str], function: Callable[..., Any], *arguments: Any, partitions: bool = False
    ) -> "dict[str, Collection]":
        """Like `flat_map` or `map_partitions`, but `function` yields `Tagged` elements. Returns collections by tag."""
        return self._add(name, "map_partitions" if partitions else "flat_map", function, arguments, tags)

    def group(self, name: str) -> "Collection":
        """Group pairs (key, value) into (key, values)."""
        return self.flow.add(Stage(name, self.outputs))[MAIN]

    def _add(
        self,
        name: str,
        kind: WorkKind,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        tags: Sequence[str] = (),
    ) -> "dict[str, Collection]":
        sides = {n: given.outputs for n, given in enumerate(arguments) if isinstance(given, Collection)}
        work = Work(kind, function, tuple(None if n in sides else given for n, given in enumerate(arguments)))
        return self.flow.add(Stage(name, self.outputs, work=work, tags=(MAIN, *tags), sides=sides))


def flatten(collections: Sequence[Collection]) -> Collection:
    """Merge one or more collections into one collection."""
    return Collection(collections[0].flow, tuple(output for each in collections for output in each.outputs))


def by_tag(made: Iterable[Any], tags: Iterable[str]) -> Outputs:
    """Group the results of a stage's work by tag."""
    outputs: Outputs = {tag: [] for tag in tags}
    for element in made:
        if isinstance(element, Tagged):
            outputs[element.tag].append(element.value)
        else:
            outputs[MAIN].append(element)
    return outputs


def group_by_key(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Elements]]:
    """Group pairs (key, value) into (key, values), in the order of arrival."""
    groups: defaultdict[Any, Elements] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return list(groups.items())


def _tag_value(element: tuple[Any, Any], tag: str) -> tuple[Any, tuple[str, Any]]:
    return element[0], (tag, element[1])


def _values_by_tag(element: tuple[Any, Iterable[tuple[str, Any]]], tags: Sequence[str]) -> tuple[Any, Outputs]:
    return element[0], {tag: [] for tag in tags} | dict(group_by_key(element[1]))
