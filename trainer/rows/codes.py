"""Codes for data types of vectors (`dtype_code`) and for optimizer methods, shared by CPU loops and GPU kernels."""

from typing import Any, NamedTuple

import numpy as np

FLOAT32, BFLOAT16 = 0, 1  # data types of vectors
SGD, MOMENTUM, ADAGRAD, ADAM = 0, 1, 2, 3  # optimizer methods
LOWBIAS = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None))  # shifts and factors of lowbias32 (Wellons, 2018)


class Matrix(NamedTuple):
    """Vectors [R, D] of the data type `dtype_code`, and the state of their optimizer; unused state has 0 rows.

    On a device, the fields are tensors, or None for unused state.
    """

    vectors: Any
    dtype_code: int
    first: Any  # [R, D]
    second: Any  # [R, D]
    scalar: Any  # [R]
    origin: int  # the label of row 0


class Rule(NamedTuple):
    """An optimizer step; `keep`: factor on a row for weight decay; `key`: key of the random bits.

    On a device, `rate` and `keep` (float32) and `key` are tensors [].
    """

    method: int
    rate: Any
    keep: Any
    beta1: np.float32  # or momentum
    beta2: np.float32
    eps: np.float32
    key: Any
