"""What holds for every mechanism holds where most pairs are left out, too: the general checks, with small sizes."""

import pytest
import test_properties as general
from selected_mechanisms import ALL, FORMS, SMALL

from ortho import MECHANISMS
from ortho.attention.selected import importance

TESTED = [name for name in ALL if name in SMALL or name not in MECHANISMS]


@pytest.fixture(params=TESTED)
def name(request, monkeypatch):
    monkeypatch.setitem(MECHANISMS, request.param, ALL[request.param])
    monkeypatch.setattr(importance, "TILE", 8)  # several in a sequence
    return request.param


def test_fast_equals_reference(name):
    general.test_fast_equals_reference(projection="learned", attention=name)


@pytest.mark.parametrize("form", FORMS)
def test_the_future_leaves_the_prefix(name, form):
    if ALL[name].causal:
        general.test_the_future_leaves_the_prefix(form=form, projection="learned", attention=name)


@pytest.mark.parametrize("form", FORMS)
def test_cut_equals_whole(name, form):
    if ALL[name].causal:
        general.test_cut_equals_whole(form=form, projection="learned", attention=name)


@pytest.mark.parametrize("form", FORMS)
def test_symmetries(name, form):
    general.test_symmetries(form=form, projection="learned", attention=name)


@pytest.mark.parametrize("form", FORMS)
def test_padding_equals_truncation(name, form):
    general.test_padding_equals_truncation(form=form, projection="learned", attention=name)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_by_finite_differences(name, form):
    """Within the neighbourhood in which the same pairs are chosen: the choice itself is not differentiated."""
    general.test_gradients_by_finite_differences(form=form, projection="learned", attention=name)


@pytest.mark.parametrize("form", FORMS)
def test_float32_is_near_float64(name, form):
    """With these numbers no score is so near another that float32 chooses differently."""
    general.test_float32_is_near_float64(form=form, projection="learned", attention=name)
