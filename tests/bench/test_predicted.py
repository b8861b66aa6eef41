"""Predictions that docs state, and what they were compared with."""

from pathlib import Path

import pytest

from bench import predicted
from bench.cases.predicted_link import Constants
from bench.predicted import _between, efficiency, model_of, predict_link
from bench.published_overlap import FITTED, KEPT_BACK, PUBLISHED
from tpkernels.planning.timeline import prediction

PAGE = (Path(__file__).parents[2] / "docs" / "overlap-predicted.md").read_text()


@pytest.mark.sweep  # plans hundreds of layouts; `published` is of the same model
def test_page_has_todays_wins():
    _, wins = predicted._wins()
    assert wins in PAGE, "write the table anew: python -m bench predicted wins"


def test_page_has_todays_model_of_published_times():
    _, published = predicted._published()
    assert published.split("\n", 2)[2] in PAGE, "write the table anew: python -m bench predicted published"


def test_published_times_lie_where_the_command_line_says():
    ratios = {}
    for each in PUBLISHED:
        ratios.setdefault(each.way, []).append(each.microseconds / model_of(each))
    said = {way: (round(min(found), 2), round(max(found), 2)) for way, found in ratios.items()}
    assert said == prediction.PUBLISHED


def test_half_of_the_sources_were_kept_back():
    counts = {use: sum(each.use == use for each in PUBLISHED) for use in (FITTED, KEPT_BACK)}
    assert counts[KEPT_BACK] >= counts[FITTED] >= 30
    assert not {each.source for each in PUBLISHED if each.use == FITTED} & {
        each.source for each in PUBLISHED if each.use == KEPT_BACK
    }


@pytest.mark.parametrize("case", predicted.CASES)
def test_a_link_without_noise_hides_what_tapering_leaves(case):
    """Products and messages of equal length: 5 % of the products are never hidden."""
    kernels = ("linear",) if "forward" in case else ("dgrad", "wgrad")
    products = {kernel: {128: 0.01, 1024: 0.08, 2048: 0.16} for kernel in kernels}
    seconds = predict_link(case, Constants(products, 0.001, 0.005, 0.16, 0.0005, 0.02, 0.01))
    assert seconds["floor"] < seconds["ours"] < seconds["naive"]
    assert 0.85 < efficiency(seconds) <= 1


def test_a_product_between_two_sizes_lies_between_their_times():
    assert _between({100: 1.0, 200: 3.0}, 150) == 2.0
    assert _between({100: 1.0, 200: 3.0}, 50) == 0.5
    assert _between({100: 1.0, 200: 3.0}, 400) == 6.0
