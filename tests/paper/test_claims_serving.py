"""S1, section 3.1: the verdicts on the cache, and that they can be others."""

from paper.claims.evidence import hardware as serving


def test_the_printed_formula_leaves_a_token_out():
    """The keys before a token are not all that the whole pass's row reads: of normal numbers a good part is missing."""
    whole, steps, before = serving.decoded_rows()
    assert (steps - whole).abs().max() < 1e-12  # 60 rounded terms
    assert ((before - whole).norm(dim=-1) > 1e-3).float().mean() > 0.9


def test_a_cache_that_forgets_is_refuted(monkeypatch):
    whole, _, before = serving.decoded_rows()
    monkeypatch.setattr(serving, "decoded_rows", lambda: (whole, before, before))
    assert serving.last_row().verdict == "refuted"


def test_a_cache_of_scores_is_refuted(monkeypatch):
    """One that kept N^2 numbers would not be what the claim says."""
    right = serving.decoded

    def quadratic(*sizes):
        found = right(*sizes)
        return type(found)(found.forward, found.nbytes * sizes[2])

    monkeypatch.setattr(serving, "decoded", quadratic)
    assert serving.step().verdict == "refuted"
