import apache_beam as beam
import pytest

from pipelines.runner import make_pipeline, run, unwrap
from schemas.errors import InputError, StorageError


class Fail(beam.DoFn):
    def process(self, element: str) -> None:
        raise StorageError(f"could not write {element}: [disk full]\nfree some space.")


class FailSetup(beam.DoFn):
    def setup(self) -> None:
        raise InputError("no tokenizer here.")

    def process(self, element: str) -> None: ...


class Crash(beam.DoFn):
    def process(self, element: str) -> None:
        raise ZeroDivisionError("ours to mend")


@pytest.mark.parametrize("flags", [[], ["--runner=DirectRunner"], ["--direct_num_workers=1"]])
def test_a_workers_error_comes_back_as_it_was(flags: list[str]) -> None:
    pipeline = make_pipeline(flags)
    pipeline | "Create" >> beam.Create(["x"]) | "Fail" >> beam.ParDo(Fail())
    with pytest.raises(StorageError) as caught:
        run(pipeline)
    assert str(caught.value) == "could not write x: [disk full]\nfree some space."


def test_an_error_from_another_process_comes_back_too() -> None:
    pipeline = make_pipeline(["--direct_num_workers=2", "--direct_running_mode=multi_processing"])
    pipeline | "Create" >> beam.Create(["x"]) | "Fail" >> beam.ParDo(Fail())
    with pytest.raises(StorageError, match=r"could not write x: \[disk full\]\nfree some space\.$"):
        run(pipeline)


def test_an_error_of_setup_comes_back() -> None:
    pipeline = make_pipeline()
    pipeline | "Create" >> beam.Create(["x"]) | "Fail" >> beam.ParDo(FailSetup())
    with pytest.raises(InputError, match=r"^no tokenizer here\.$"):
        run(pipeline)


def test_a_bug_is_not_dressed_up() -> None:
    pipeline = make_pipeline()
    pipeline | "Create" >> beam.Create(["x"]) | "Crash" >> beam.ParDo(Crash())
    with pytest.raises(Exception, match="ours to mend") as caught:
        run(pipeline)
    assert not isinstance(caught.value, StorageError | InputError)
    assert unwrap(caught.value) is None


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--direct_num_worker=2", r"unknown Beam option '--direct_num_worker=2'\. Did you mean --direct_num_workers\?"),
        ("--runner=NoSuchRunner", "cannot use the Beam runner 'NoSuchRunner'"),
        ("--direct_num_workers=many", "Beam options .*direct_num_workers.*many"),
    ],
)
def test_wrong_options_are_refused(flag: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_pipeline([flag])
