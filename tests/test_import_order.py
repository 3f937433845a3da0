"""PyTorch and Faiss each load an OpenMP runtime; with some builds one order of imports crashes the process."""

import subprocess
import sys

import pytest

WORK = """
import numpy as np
vectors = np.random.default_rng(0).standard_normal((2000, 32)).astype(np.float32)
scores, found = faiss.knn(vectors[:300], vectors, 5, metric=faiss.METRIC_INNER_PRODUCT)
product = torch.from_numpy(vectors[:300]) @ torch.from_numpy(vectors).T
assert np.allclose(product.max(dim=1).values.numpy(), scores[:, 0], atol=1e-3)
index = faiss.index_factory(32, "IVF8,Flat", faiss.METRIC_INNER_PRODUCT)
index.train(vectors)
index.add(vectors)
assert index.ntotal == 2000
"""


@pytest.mark.parametrize("order", ["import faiss, torch", "import torch, faiss"])
def test_both_orders_search_and_multiply(order):
    done = subprocess.run([sys.executable, "-c", order + WORK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
