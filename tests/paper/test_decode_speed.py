"""Decoding, of a mechanism and of a whole model: a wrong cache is not timed, what cannot be read is recorded."""

import dataclasses

import pytest
import torch
from tiny_arms import shrink_models

from ortho.attention.linear.feature_maps import HORIZON
from ortho.models.language_model import LanguageModel
from paper.experiments import EXPERIMENTS, measure
from paper.experiments.speed import decoding as speed
from paper.experiments.speed import generation

TINY = {"H": 2, "K": 8, "N": 1024}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    for module in (speed, generation):
        monkeypatch.setitem(module.CALL_SECONDS, "cpu", 1e-3)
        monkeypatch.setitem(module.BUDGETS, "cpu", dataclasses.replace(module.BUDGETS["cpu"], least=2))


@pytest.fixture
def small_model(monkeypatch):
    shrink_models(monkeypatch)


def test_what_a_cache_holds_is_what_is_declared():
    """If a mechanism keeps its tokens, the declared size is with or without the tokens timed after the context."""
    case = speed.case("recurrent", **TINY)
    outcome = speed.run(case, seconds=0.0)
    for arm in speed.arms_of(case):
        name, context = speed.parts_of(arm)
        held = {speed.declared(case, f"{name} {n - 1}").nbytes for n in (1024, 1024 + 32)}
        assert context == 1024
        assert outcome["facts"][arm]["held_bytes"] in held


def test_a_wrong_cache_is_not_timed(monkeypatch):
    """A cache that forgets one token of 320 is off by some 1/320 of a softmax's output, 1e4 times the bound."""
    right = speed.new_cache

    def forgetful(name, capacity):
        cache = right(name, capacity)
        attend = cache.attend

        def late(**tokens):
            if cache.length == 0:
                attend(**{key: 0 * x[:, :, :1] for key, x in tokens.items()})
            return attend(**tokens)

        cache.attend = late
        cache.capacity += 1
        return cache

    monkeypatch.setattr(speed, "new_cache", forgetful)
    with pytest.raises(AssertionError, match="linear: expected a relative error of at most"):
        speed.check(speed.case("recurrent", **TINY), "linear")


def test_what_cannot_be_read_is_a_failure(monkeypatch):
    """A context beyond cosFormer's horizon is a failure of that arm; the other arms are timed."""
    monkeypatch.setitem(speed.CONTEXTS, "cpu", (1024, 2 * HORIZON))
    monkeypatch.setitem(speed.READ_FLOPS, "cpu", 2e9)
    case = speed.case("recurrent", **TINY | {"N": 2 * HORIZON})
    record = measure(EXPERIMENTS["decode-speed"], case, "cpu", seconds=0.01)
    assert list(record["failures"]) == [f"cosformer {2 * HORIZON}"]
    assert "horizon: expected positions within" in record["failures"][f"cosformer {2 * HORIZON}"]
    assert f"linear {2 * HORIZON}" in record["repetitions"]


def test_another_error_is_the_case_s(monkeypatch):
    def refuses(*_):
        raise ValueError("k: expected something else")

    monkeypatch.setattr(speed, "_read", refuses)
    with pytest.raises(ValueError, match="k: expected something else"):
        speed.run(speed.case("recurrent", **TINY), seconds=0.01)


def test_what_is_too_long_to_read_is_left_out():
    """Softmax attention, with which the others are compared, is timed at every context."""
    arms = speed.arms_of(speed.case("softmax"))
    assert all(f"softmax {context}" in arms for context in speed.CONTEXTS["cpu"])
    assert "path 65536" not in arms
    assert "path 4096" in arms


def test_what_a_model_holds(small_model):
    record = measure(EXPERIMENTS["generation"], generation.case(2, N=20), "cpu", seconds=0.0)
    found = {row["arm"]: row for row in generation.rows([record])}
    held = {arm: row["held_bytes"] for arm, row in found.items()}
    assert held["learned"] == held["frozen"] == 4 * held["multi-query"] == 3 * 2 * 2 * (20 + generation.STEPS) * 16 * 4
    assert found["learned"]["speedup"] == (1.0, 1.0, 1.0)
    model = generation.build(generation.case(N=20), "learned")
    assert found["learned"]["weight_bytes"] == 4 * sum(x.numel() for x in model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arm", generation.ARMS)
def test_models_that_decode_rightly_pass_the_check(small_model, arm, dtype):
    generation.check(generation.case(N=20, dtype=dtype), arm, torch.randint(23, (1, 40)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_decodes_wrongly_is_not_timed(monkeypatch, small_model, dtype):
    """The model puts each token at the first position."""
    embed = LanguageModel._embed
    calls = []

    def lost(self, tokens, past, *padding):
        calls.append(past)
        own = next(self.parameters()).dtype == getattr(torch, dtype)
        return embed(self, tokens, 0 if own else past, *padding)

    monkeypatch.setattr(LanguageModel, "_embed", lost)
    with pytest.raises(AssertionError, match="learned: expected a relative error of at most"):
        generation.check(generation.case(N=20, dtype=dtype), "learned", torch.randint(23, (1, 40)))
    assert max(calls) == 39
