"""Phases: what a finished one leaves is found by a later run of the same work, and nothing else stays."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.sharding.publish import Phases
from schemas import storage
from schemas.errors import ClaimLostError
from schemas.owners import Claim, Owner, claimed
from schemas.storage import join


def write(phases: Phases, *kinds: str) -> None:
    for kind in kinds:
        storage.write_bytes(join(phases.folder(kind), "some.arrow"), kind.encode())


def again(phases: Phases, digest: str = "same") -> Phases:
    """A later run's, whose claim is another."""
    return Phases(phases.root, digest, replace_claim(phases.claim))


def replace_claim(claim: Claim) -> Claim:
    later = Claim(claim.root, replace(claim.owner, id=Owner.here("made").id))
    later.require = claim.require  # type: ignore[method-assign]  # whoever holds the output
    return later


def test_a_later_run_finds_the_last_finished_phase_and_what_it_needs(tmp_path: Path) -> None:
    root = str(tmp_path / "phases")
    with claimed(str(tmp_path), "made") as claim:
        first = Phases(root, "same", claim)
        assert first.find("read", "made") is None
        write(first, "raw", "rows", "rejects")
        first.finish("read", {"n": 1}, ("rows", "rejects"))
        assert storage.list_names(root) == sorted(["read.json", *(f"{k}-{claim.attempt}" for k in ("rows", "rejects"))])
        write(first, "half")
        second = again(first)
        assert second.find("read", "made") == ("read", {"n": 1})
        assert second.needed
        assert storage.list_names(root) == sorted(["read.json", *(f"{k}-{claim.attempt}" for k in ("rows", "rejects"))])
        write(second, "shards")
        second.finish("made", [2], ("rejects", "shards"))
        left = [f"rejects-{claim.attempt}", f"shards-{second.claim.attempt}", "made.json"]
        assert storage.list_names(root) == sorted(left)
        assert again(second).find("read", "made") == ("made", [2])
        assert again(second).find() is None
        assert storage.list_names(root) == []


@pytest.mark.parametrize("damage", ["other work", "gone", "shorter", "record"])
def test_what_is_not_whole_or_of_other_work_is_removed(tmp_path: Path, damage: str) -> None:
    root = str(tmp_path / "phases")
    with claimed(str(tmp_path), "made") as claim:
        first = Phases(root, "same", claim)
        write(first, "rows")
        first.finish("read", {}, ("rows",))
        file = Path(first.folder("rows"), "some.arrow")
        if damage == "gone":
            file.unlink()
        elif damage == "shorter":
            file.write_bytes(b"ro")
        elif damage == "record":
            Path(root, "read.json").write_bytes(b"{}")
        later = again(first, "other" if damage == "other work" else "same")
        assert later.find("read") is None
        assert not later.needed
        assert storage.list_names(root) == []


def test_who_has_lost_the_output_removes_nothing(tmp_path: Path) -> None:
    root = str(tmp_path / "phases")
    with claimed(str(tmp_path), "made") as claim:
        first = Phases(root, "same", claim)
        write(first, "rows")
        first.finish("read", {}, ("rows",))
        lost = again(first)

        def gone() -> None:
            raise ClaimLostError("taken over")

        lost.claim.require = gone  # type: ignore[method-assign]
        for use in (lost.clear, lambda: lost.find("read"), lambda: lost.finish("read", {}, ())):
            with pytest.raises(ClaimLostError):
                use()
        assert again(first).find("read") == ("read", {})
