"""Beam's options, parsed once: views are kept, share what is set, and are not copied."""

import copy
import pickle

import pytest
from apache_beam.options.pipeline_options import DirectOptions, SetupOptions, StandardOptions

from pipelines.runners.parsed_options import ParsedOptions


def test_views_are_kept_and_share_what_is_set() -> None:
    options = ParsedOptions(["--direct_num_workers=3"])
    direct = options.view_as(DirectOptions)
    assert options.view_as(DirectOptions) is direct
    assert direct.direct_num_workers == 3
    direct.direct_num_workers = 5
    options.view_as(SetupOptions).save_main_session = True
    assert options.get_all_options()["direct_num_workers"] == 5
    assert direct.view_as(SetupOptions).save_main_session
    assert options.view_as(StandardOptions).view_as(DirectOptions).direct_num_workers == 5


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda options: pickle.loads(pickle.dumps(options))])
def test_a_copy_is_of_what_is_set_and_is_its_own(copied) -> None:
    options = ParsedOptions(["--direct_num_workers=3"])
    options.view_as(DirectOptions).direct_num_workers = 5
    other = copied(options)
    assert other.view_as(DirectOptions).direct_num_workers == 5
    other.view_as(DirectOptions).direct_num_workers = 7
    assert options.view_as(DirectOptions).direct_num_workers == 5
