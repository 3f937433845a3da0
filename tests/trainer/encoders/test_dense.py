"""Dense vectors in a bag: x = r(sum_f w_f E_f + P d) by hand, its gradient on P, and rows in any parts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize, relu

from schemas.errors import InputError, TableError
from schemas.mapped import MappedFile
from schemas.ragged import SparseRows
from scoring.exported import forms_of
from tests.builders import ragged, random_features, tokens_of, value_of
from tests.trainer.encoders.test_bag_encoder import FORMS, KEY, VOCABULARY, batch
from trainer.encoders.bag_encoder import BagEncoder
from trainer.heads import CachedEmbeddings
from trainer.input_kinds import input_names
from trainer.inputs import Inputs
from trainer.methods.kinds import BagSection, TransformerSection, import_name
from trainer.methods.recipe import Recipe
from trainer.sizes import parameter_bytes

ROWS, NARROW, WIDE = 9, 4, 11  # d on either side of D
D = 7


def vectors(dense: int) -> np.ndarray:
    made = np.random.default_rng(dense).standard_normal((ROWS, dense)).astype(np.float16)
    made[3] = 0
    return made


def build(dense: int, **changes: object) -> BagEncoder:
    form = {"dimension": D, "inputs": "tokens+dense", "ngrams": 1, "optimizer": "sgd", **changes}
    return BagSection.model_validate(form).build(VOCABULARY, 3, dense=dense)


@pytest.mark.parametrize("dense", [NARROW, WIDE])
def test_a_projection_begins_orthonormal_and_is_added_to_the_bag(dense: int) -> None:
    encoder, alone = build(dense, dense_weight=0.5, initial_scale=3.0), build(dense, inputs="tokens", initial_scale=3.0)
    p = encoder.tensors()["projection.weight"]
    assert p.shape == (D, dense)
    gram = (p.T @ p if dense < D else p @ p.T) / 9
    torch.testing.assert_close(gram, torch.eye(len(gram)), atol=1e-5, rtol=0)
    tokens = batch(ROWS)
    bag = alone.encode(alone.prepare(Inputs(tokens)))
    d = normalize(torch.from_numpy(vectors(dense)).double(), dim=1)
    assert not d[3].any()
    x = encoder.encode(encoder.prepare(Inputs(tokens, dense=vectors(dense))))
    torch.testing.assert_close(x.double(), bag.double() + 0.5 * d @ p.double().T, atol=1e-5, rtol=1e-5)


def test_vectors_alone_need_no_features() -> None:
    encoder = build(WIDE, inputs="dense")
    rows = Inputs(dense=vectors(WIDE))
    encoder.fit([rows])
    encoder.admit([rows], ROWS)
    expected = normalize(torch.from_numpy(vectors(WIDE)).float(), dim=1) @ encoder.tensors()["projection.weight"].T
    torch.testing.assert_close(encoder.encode(encoder.prepare(rows)), expected)
    assert encoder.tensors()["embedding"].shape == (0, D)


def test_the_gradient_on_the_projection_is_that_of_autograd_whole_and_in_parts() -> None:
    rows, target = (
        Inputs(batch(ROWS), dense=vectors(WIDE)),
        torch.randn(ROWS, D, generator=torch.Generator().manual_seed(1)),
    )

    def gradients(size: int) -> dict[str, torch.Tensor]:
        encoder = build(WIDE, residual=True)
        cached = CachedEmbeddings(encoder, rows.slice, ROWS, size, lambda start: (*KEY, 0))
        x = cached.embed()
        (x * target).sum().backward()
        cached.backward(x.grad)
        return {name: value.grad.clone() for name, value in encoder._modules.named_parameters()}

    encoder = build(WIDE, residual=True)
    tensors = {name: value.double() for name, value in encoder.tensors().items()}
    p = tensors["projection.weight"].requires_grad_()
    alone = build(WIDE, inputs="tokens")
    v = alone.encode(alone.prepare(Inputs(rows.tokens))).double()
    u = v + normalize(torch.from_numpy(vectors(WIDE)).double(), dim=1) @ p.T
    x = u + relu(u @ tensors["dense.inner.weight"].T + tensors["dense.inner.bias"])
    (x * target).sum().backward()
    for size in (ROWS, 4):
        torch.testing.assert_close(gradients(size)["projection.weight"].double(), p.grad, atol=1e-5, rtol=1e-4)


def test_checkpoints_without_vectors_keep_their_names_and_sizes_count_the_projection() -> None:
    names = {"embedding", "feature_weights", "dense.inner.weight", "dense.inner.bias"}
    assert build(WIDE, residual=True, inputs="tokens").tensors().keys() == names
    encoder = build(WIDE, residual=True)
    assert encoder.tensors().keys() == names | {"projection.weight"}
    recipe = Recipe.model_validate({"method": "astra", "encoder": encoder._config.model_dump()})
    sizes = [sum(parameter_bytes(recipe, VOCABULARY, 0, dense)) for dense in (0, WIDE)]
    assert sizes[1] - sizes[0] == 3 * 4 * D * WIDE  # with Adam's two moments
    least = [BagEncoder.least_bytes(encoder._config, VOCABULARY, 0, dense) for dense in (0, WIDE)]
    assert least[1] - least[0] == 4 * D * WIDE


def test_a_transformer_refuses_vectors() -> None:
    with pytest.raises((ValueError, InputError), match="a transformer reads token ids only"):
        TransformerSection.model_validate({"kind": "transformer", "model": "m", "inputs": "tokens+dense"})


def test_vectors_of_another_length_than_the_manifest_states_are_refused() -> None:
    encoder = build(WIDE)
    with pytest.raises(TableError, match="a vector of 4 numbers, but the data manifest specifies 11"):
        encoder.prepare(Inputs(batch(ROWS), dense=vectors(NARROW)))
    with pytest.raises(ValueError, match="needs vectors, but the data has none"):
        build(0)


def test_rows_read_without_vectors_are_a_fault() -> None:
    encoder = build(WIDE)
    with pytest.raises(AssertionError, match="read without dense vectors"):
        encoder.encode(encoder.prepare(tokens_of(batch(ROWS))))


@pytest.mark.parametrize("inputs", ["tokens", "features", "both", "dense", "tokens+dense", "all"])
@pytest.mark.parametrize("form", FORMS)
def test_numpy_computes_the_same_x_from_the_files(inputs: str, form: dict[str, object], tmp_path: Path) -> None:
    options = {"dimension": D, "inputs": inputs, "ngrams": 2, "buckets": 40, "dense_weight": 0.7, **form}
    section = BagSection.model_validate(options)
    read = {"dense": WIDE} if "dense" in input_names(section.inputs) else {}
    encoder = section.build(VOCABULARY, 3, 12, **read)
    encoder.tensors()["feature_weights"].uniform_(0, 3)
    encoder.write(tmp_path, 0)
    drawn = random_features(np.random.default_rng(1), ROWS, 12, 5)
    ids, offsets = ragged(drawn, np.int32)
    features = SparseRows(ids, np.float32([value for row in drawn for value in value_of(row)]), offsets)
    rows = Inputs(batch(ROWS), features, vectors(WIDE))
    file = MappedFile(str(tmp_path / "model.safetensors"))
    served = import_name(forms_of(section)["numpy"]).open(
        section, tmp_path, lambda _: file, (VOCABULARY, 12, WIDE), "cpu"
    )
    expected = encoder.encode(encoder.prepare(rows)).numpy()
    np.testing.assert_allclose(served.embed(rows), expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(served.embed(rows.slice(4, 5)), expected[4:5], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="do not match the encoder"):
        import_name(forms_of(section)["numpy"]).open(
            section.model_copy(update={"dimension": D + 1}), tmp_path, lambda _: file, (VOCABULARY, 12, WIDE), "cpu"
        )
