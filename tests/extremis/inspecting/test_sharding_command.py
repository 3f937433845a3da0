"""The command that a data set says it was made by: typed with the places filled in, it makes the same again."""

import shlex
from pathlib import Path

import pytest

from extremis.cli import cli
from extremis.inspecting import sharding_command
from pipelines.options import ShardOptions
from schemas.manifest import Manifest, open_manifest
from tests.command import call
from tests.pipelines.raw import write_tiny
from tests.pipelines.test_versions import SEQUENCE, make

OPTIONS = (
    ("--tokenizer", "train:300", "--row-group-rows", "8", "--shards", "3"),
    (
        *("--propensity", "0.6,2.6", "--keep-text", "--validation", "0.2", "--seed", "7", "--text", "title"),
        *("--max-tokens", "9", "--sink", "webdataset", "--format", "xc", "--tokenizer", "train:302"),
    ),
)


def made_again(data: Path, places: dict[str, Path]) -> str:
    """Type the command that `data` says, at another place; return the digest of what it makes."""
    again = data.parent / "again"
    words = shlex.split(sharding_command("AGAIN", open_manifest(str(data))))[1:]
    named = {"AGAIN": again, **places}
    assert call(*[named.get(word, word) for word in words]).status == 0
    return open_manifest(str(again)).digest


@pytest.mark.parametrize("options", OPTIONS)
def test_a_data_set(options: tuple[str, ...], tmp_path: Path) -> None:
    raw = write_tiny(tmp_path / "raw", rows=60, labels=20)
    assert call("shard", raw, tmp_path / "data", *options).status == 0
    digest = open_manifest(str(tmp_path / "data")).digest
    assert made_again(tmp_path / "data", {"INPUT": raw}) == digest


def test_a_tokenizer_of_ones_own(tmp_path: Path) -> None:
    raw = write_tiny(tmp_path / "raw", rows=60, labels=20)
    assert call("shard", raw, tmp_path / "first", "--tokenizer", "train:300").status == 0
    tokenizer = tmp_path / "first" / "tokenizer"
    assert call("shard", raw, tmp_path / "data", "--tokenizer", tokenizer).status == 0
    digest = open_manifest(str(tmp_path / "data")).digest
    assert made_again(tmp_path / "data", {"INPUT": raw, "TOKENIZER": tokenizer}) == digest


def test_a_version(tmp_path: Path) -> None:
    make(tmp_path, SEQUENCE)
    data, places = tmp_path / "data1", {"INPUT": tmp_path / "raw1", "DATA1": tmp_path / "data0"}
    assert made_again(data, places) == open_manifest(str(data)).digest


def test_every_option_has_a_flag_of_the_command() -> None:
    manifest = Manifest(kind="data", parameters={"options": dict.fromkeys(ShardOptions.model_fields, "value")})
    flags = {word for word in shlex.split(sharding_command("data/", manifest)) if word.startswith("--")}
    assert flags <= {flag for option in cli.commands["shard"].params for flag in option.opts}
    assert len(flags) == len(ShardOptions.model_fields) - 1  # one for both propensities


def test_inspect_says_it(tmp_path: Path) -> None:
    raw = write_tiny(tmp_path / "raw", rows=60, labels=20)
    assert call("shard", raw, tmp_path / "data", "--tokenizer", "train:300", "--propensity", "0.55,1.5").status == 0
    done = call("inspect", tmp_path / "data")
    assert f"extremis shard INPUT {tmp_path / 'data'} --propensity 0.55,1.5 --tokenizer train:300" in done.out
    assert "options.tokenizer: train:300" in done.out
    assert done.status == 0
