"""Claims of a paper, as data (runs/claims.toml): the runs for each claim, and the check that decides."""

import hashlib
import json
import sys
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, ValidationError, model_validator

from pipelines import formats
from pipelines.sharding.publish import files_of
from schemas.errors import InputError
from schemas.options import Options
from trainer.recipe_files import read_recipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
CLAIMS = "runs/claims.toml"  # apart from recipes, so that `ablate` can compare a folder of recipes


class DataSet(Options):
    """A data set: the folder `raw` of --data with every `every`-th label; other fields are options of `shard`."""

    raw: str
    every: int = Field(1, ge=1)
    validation: float = Field(0.0, ge=0, lt=1)
    tokenizer: str = ""
    max_tokens: int = 0


class Run(Options):
    """A training of `recipe` with `settings`, or the process `module`; `on`: extra settings per data set.

    `after`: the run whose folder replaces `{after}` in settings; without a recipe it is only scored. Settings of a
    module are its arguments, and may contain `{data}` and `{seed}`; all settings may contain `{minilm}`. `scores` and
    `fuse`: values of `extremis evaluate --scores` and `fuse --by`. `minutes`: expected minutes of one seed.
    """

    recipe: str = ""
    module: str = ""
    settings: list[str] = []
    on: dict[str, list[str]] = {}
    after: str = ""
    scores: str = ""
    fuse: str = ""
    minutes: float | dict[str, float] = 1.0

    def expected(self, data: str) -> float:
        """Expected minutes of one seed on `data`."""
        return self.minutes.get(data, 0.0) if isinstance(self.minutes, dict) else self.minutes


class Check(Options):
    """The deciding check: with `above`, the paired difference in `metric` of `a` minus `b` must exceed `above`.

    Else `least` or `most` bounds a `metric` or a `figure` of `a`, or its ratio to the value of `b`. If a side has
    several names, the best run on validation counts. `untrained`: runs that do not train, as the claim says.
    """

    a: str | list[str]
    b: str | list[str] = []
    metric: str = ""
    figure: str = ""
    above: float | None = None
    least: float | None = None
    most: float | None = None
    untrained: list[str] = []

    @property
    def sides(self) -> list[list[str]]:
        """Names of the runs of each side."""
        return [[side] if isinstance(side, str) else side for side in (self.a, self.b) if side]

    @model_validator(mode="after")
    def _check(self) -> "Check":
        bounds = [bound for bound in (self.above, self.least, self.most) if bound is not None]
        if len(bounds) != 1 or bool(self.metric) == bool(self.figure):
            raise ValueError("a check has one of metric and figure, and one of above, least and most")
        if self.above is not None and not (self.metric and self.b):
            raise ValueError("above compares a metric of a and b")
        return self


class Claim(Options):
    """A claim in our words, with the paper's own figures; `on`: data sets, one line of the page each.

    `untestable`: the reason why two cores cannot test it. `note`: result of an experiment if the claim does not hold.
    `main`: short wording of a main claim of the paper, for README.md. `cause`: whether it separates two causes of what
    another claim found.
    """

    table: str
    where: str
    claim: str
    paper: str
    on: list[str] = [""]
    seeds: int | dict[str, int] = 3
    checks: list[Check] = []
    untestable: str = ""
    note: str = ""
    main: str = ""
    cause: bool = False

    @model_validator(mode="after")
    def _check(self) -> "Claim":
        if bool(self.checks) == bool(self.untestable):
            raise ValueError(f"{self.claim!r} has checks, or says why it is untestable")
        return self


class RunKey(NamedTuple):
    """A run on a data set with a seed; gives its file and folder their names."""

    run: str
    data: str
    seed: int

    def __str__(self) -> str:
        return ".".join(filter(None, (self.run, self.data, str(self.seed))))


class Line(NamedTuple):
    """A claim on one data set."""

    claim: Claim
    data: str

    @property
    def seeds(self) -> int:
        """Number of seeds of each run."""
        seeds = self.claim.seeds
        return seeds.get(self.data, 1) if isinstance(seeds, dict) else seeds

    @property
    def runs(self) -> list[str]:
        """Names of the line's runs, each once."""
        return [*dict.fromkeys(name for check in self.claim.checks for side in check.sides for name in side)]


class Paper(Options):
    """The claims of a paper; `settings` apply to all its trainings. `raw`: the folder --data, if data are compared."""

    title: str
    settings: list[str] = []
    sets: dict[str, DataSet] = {}
    runs: dict[str, Run] = {}
    claims: list[Claim]
    folder: Path = Path()
    raw: Path | None = None

    @classmethod
    def load(cls, name: str, raw: Path | None = None) -> "Paper":
        """Read a paper by its name in this folder, or by the path of another folder. Raises InputError."""
        folder = Path(__file__).with_name(name) if name in paper_names() else Path(name)
        try:
            body = tomllib.loads((folder / CLAIMS).read_text())
            for run in body.get("runs", {}).values():
                extend(run, body["runs"])
            return cls.model_validate({**body, "folder": folder, "raw": raw})
        except FileNotFoundError:
            known = ", ".join(paper_names())
            raise InputError(f"no claims of paper {name!r}: choose from {known}, all, or give a folder.") from None
        except (tomllib.TOMLDecodeError, ValidationError) as error:
            raise InputError(f"{folder / CLAIMS}: {error}") from None

    @cached_property
    def lines(self) -> list[Line]:
        """One line per claim and data set."""
        return [Line(claim, data) for claim in self.claims for data in claim.on]

    def settings_of(self, key: RunKey) -> list[str]:
        """Settings of a training, with `{after}` not yet replaced."""
        run = self.runs[key.run]
        own = [*run.settings, *run.on.get(key.data, [])]
        return [*self.settings, *own, f"train.seed={key.seed}"] if run.recipe else own

    def recipe_of(self, run: Run) -> str:
        """Return the name of a shipped recipe, or the path of a paper's recipe."""
        return str(self.folder / run.recipe) if run.recipe.endswith(".toml") else run.recipe

    def made_from(self, key: RunKey) -> dict[str, Any]:
        """All stated facts that determine the figures of a run; a result with other facts is outdated, and not read."""
        run = self.runs[key.run]
        needed = self.needed(key)
        after = {"after": self.made_from(needed)} if needed else {}
        data = self.sets[key.data].model_dump(exclude_defaults=True) if key.data else {}
        stated = {name: getattr(run, name) for name in ("recipe", "module", "scores", "fuse") if getattr(run, name)}
        settings = self.settings_of(key)
        if run.recipe:
            stated["recipe_digest"] = digest_recipe(self.recipe_of(run), tuple(settings))
        return {"data": data, **stated, "settings": settings, **after}

    def raw_folder(self, name: str) -> Path:
        """Folder of a data set's raw files. Raises InputError if it is missing."""
        folder = (self.raw or Path()) / self.sets[name].raw
        if not folder.is_dir():
            raise InputError(f"data set {name}: no folder {folder}. Give the folder that has {folder.name}/ as --data.")
        return folder

    def raw_digest(self, name: str) -> str:
        """Digest of the raw files of a data set; "" if the paper was read without them, or they are not there."""
        folder = self.raw / self.sets[name].raw if self.raw and name else None
        return digest_files(folder) if folder and folder.is_dir() else ""

    def place_of_data(self, name: str, out: Path) -> Path:
        """Return the folder of a sharded data set; other raw files or options have another folder."""
        return out / "data" / f"{name}-{_digest([self.sets[name].model_dump(), self.raw_digest(name)])}"

    def place_of_run(self, key: RunKey, out: Path) -> Path:
        """Return the folder of a training; other facts or raw files have another folder."""
        return out / self.folder.name / f"{key}-{_digest([self.made_from(key), self.raw_digest(key.data)])}"

    def keys_of(self, line: Line, most: int) -> Iterator[RunKey]:
        """Runs of a line with at most `most` seeds; a run comes after the run that it needs."""
        for seed in range(min(most, line.seeds)):
            for name in line.runs:
                key = RunKey(name, line.data, seed)
                if needed := self.needed(key):
                    yield needed
                yield key

    def needed(self, key: RunKey) -> RunKey | None:
        """Return the run from which `key` continues, or None."""
        after = self.runs[key.run].after
        return key._replace(run=after) if after else None

    def metrics_of(self, key: RunKey) -> list[str]:
        """Metrics that claims compare; contributions per query are kept for them."""
        checks = (check for claim in self.claims for check in claim.checks if key.data in claim.on)
        return sorted({c.metric for c in checks if c.metric and any(key.run in side for side in c.sides)})

    @model_validator(mode="after")
    def _check(self) -> "Paper":
        for line in self.lines:
            for name in line.runs:
                if name not in self.runs:
                    raise ValueError(f"{line.claim.claim!r} needs a run {name!r} that is not there")
            if line.data and line.data not in self.sets:
                raise ValueError(f"{line.claim.claim!r} is on {line.data!r}, which is no data set here")
        for name, run in self.runs.items():
            if not (run.recipe or run.module or run.after) or (run.after and run.after not in self.runs):
                raise ValueError(f"run {name!r} has neither recipe nor module, nor a run that it goes on from")
        return self


def extend(run: dict[str, Any], runs: dict[str, Any]) -> None:
    """Add to `run` the fields of the earlier run that it is `like`; its settings come first. Raises InputError."""
    if "like" not in run:
        return
    like = run.pop("like")
    if like not in runs or "like" in runs[like]:
        raise InputError(f"claims.toml: like = {like!r}: no run of this name comes before.")
    base = runs[like]
    places = {*base.get("on", {}), *run.get("on", {})}
    both = {data: [*base.get("on", {}).get(data, []), *run.get("on", {}).get(data, [])] for data in places}
    run |= {**base, **run, "settings": [*base.get("settings", []), *run.get("settings", [])], "on": both}


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


@cache
def digest_recipe(source: str, settings: tuple[str, ...]) -> str:
    """Return the digest of a recipe with settings, without comments and defaults. Raises InputError."""
    return _digest(read_recipe(source, settings))


@cache
def digest_files(folder: Path) -> str:
    """Return the digest of the names and content of the files that `shard` reads. Raises InputError."""
    files = sorted(map(Path, files_of(formats.choose(str(folder)).find(str(folder)))))
    return _digest([(path.relative_to(folder), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files])


def paper_names() -> list[str]:
    """Names of the papers with claims in this folder."""
    return sorted(path.parents[1].name for path in Path(__file__).parent.glob(f"*/{CLAIMS}"))
