"""Candidates as uint64 keys, with the score in the high half and the label in the low half.

In ascending order of keys, the best score comes first; among equal scores, the smaller label comes first. So a merge is
a sort, and the result of a merge does not depend on the order of the blocks.
"""

from collections.abc import Sequence

import numpy as np

from schemas import PAD
from schemas.ragged import pad_columns

EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)  # no candidate; sorts last
MOST_LABELS = 1 << 32
NOT_A_NUMBER = (
    "a score is not a number, because the queries or the vectors contain NaN or infinity. Training has diverged: go "
    "back to an earlier checkpoint, or lower the learning rate."
)


def pack(label_ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return uint64 keys of `label_ids` (integers in [0, 2^32), PAD: no label) and `scores` (float32, same shape)."""
    bits = (scores + np.float32(0)).view(np.int32)  # + 0 turns -0 into 0, so that -0 and 0 are the same score
    # An IEEE float is a sign and a magnitude. For positive numbers, all bits except the sign are flipped. As unsigned
    # integers, the floats then sort in descending order. The bits are flipped in place, because these arrays are the
    # largest of a search.
    downward = bits >> 31
    np.invert(downward, out=downward)
    downward &= np.int32(0x7FFFFFFF)
    downward ^= bits
    halves = np.empty((*bits.shape, 2), "<u4")
    halves[..., 0], halves[..., 1] = label_ids, downward.view(np.uint32)
    keys = halves.view("<u8")[..., 0]
    np.copyto(keys, EMPTY, where=label_ids == PAD)
    return keys


def unpack(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (label_ids int64, scores float32) of uint64 keys; an EMPTY key gives PAD and -inf."""
    label_ids = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    label_ids[keys == EMPTY] = PAD
    return label_ids, scores_of(keys)


def scores_of(keys: np.ndarray) -> np.ndarray:
    """Return the float32 scores of uint64 keys; -inf for EMPTY."""
    downward = (keys >> np.uint64(32)).astype(np.uint32).view(np.int32)
    # The operation in `pack` is its own inverse.
    bits = np.invert(downward >> 31)
    bits &= np.int32(0x7FFFFFFF)
    bits ^= downward
    scores = bits.view(np.float32)
    scores[keys == EMPTY] = -np.inf
    return scores


def best(keys: np.ndarray, width: int) -> np.ndarray:
    """Return the best `width` keys of each row, best first: [B, C] -> [B, width], padded with EMPTY if C < width."""
    if keys.shape[1] > width:
        return np.sort(np.partition(keys, width - 1, axis=1)[:, :width], axis=1)
    return pad_columns(np.sort(keys, axis=1), width, EMPTY)


def merge(blocks: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Return the best `width` keys of each row over P blocks: arrays [B, K] -> [B, width]. Blocks share no label."""
    return best(np.concatenate(blocks, axis=1), width)
