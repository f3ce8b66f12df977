"""Figures have numbers in numbered chapters alone."""

from types import SimpleNamespace

from tools import figure_numbers


def test_pages_without_a_number_have_no_numbers_of_figures():
    env = SimpleNamespace(
        toc_secnumbers={"chapter": {"": (7,)}, "page": {}},
        toc_fignumbers={"chapter": {"figure": {"a": (7, 1)}}, "page": {"figure": {"b": (1,)}, "theorem": {"c": (1,)}}},
    )
    figure_numbers.drop(None, env)
    assert env.toc_fignumbers == {"chapter": {"figure": {"a": (7, 1)}}, "page": {"theorem": {"c": (1,)}}}
