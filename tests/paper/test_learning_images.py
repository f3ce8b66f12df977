"""The vision transformers: their heads, how classes are read, that they learn; photographs use the same code."""

import pytest
import torch
from seeded import SIGMAS, generator

from paper.experiments import EXPERIMENTS, measure
from paper.experiments.learning import images
from paper.tasks.images import Images, classification, digits

TINY = {"steps": 2, "B": 2, "d": 16, "L": 1, "tested": 8}
every_arm = pytest.mark.parametrize("arm", images.ARMS)


@every_arm
def test_arms_differ_in_queries_and_keys_alone(arm):
    case = images.case(arm)
    d, L = case["d"], case["L"]
    every, own = (
        sum(p.numel() for p in images.build(images.case(name), generator()).parameters() if p.requires_grad)
        for name in ("learned", arm)
    )
    without = {"linear": 0, "FAVOR+": 0, "learned": 0}.get(arm, 3 if arm.startswith("1 learned") else images.HEADS)
    assert every - own == without * 2 * L * d**2 // images.HEADS


@every_arm
def test_no_heads_are_causal_and_attention_has_no_biases(arm):
    model = images.build(images.case(arm, **TINY), generator())
    assert not any("bias" in name for name, _ in model.blocks[0].attention.named_parameters())
    assert model.blocks[0].feed_forward.bias_up is not None
    x = torch.randn(1, 17, 16, generator=generator(1), requires_grad=True)
    model.blocks[0].attention(x)[0, 8].sum().backward()
    seen = x.grad[0].abs().sum(-1) > 0
    if arm in ("identity", "positional"):
        assert seen.nonzero().flatten().tolist() == ([8] if arm == "identity" else [4, 7, 9, 12])
    else:
        assert seen.all()


def test_heads_see_the_neighbours_of_a_patch():
    """The 4 x 4 patches come after the class token. The mechanism's own tests check that it applies these weights."""
    layer = images.neighbours(16, 4, columns=4, generator=generator())
    weights = [pattern.weights(17) for pattern in layer.patterns]
    place = {(row, column): 1 + 4 * row + column for row in range(4) for column in range(4)}
    for row, column in ((1, 1), (2, 1), (2, 2)):
        seen = [int(matrix[place[row, column]].argmax()) for matrix in weights]
        assert seen == [place[row, column - 1], place[row - 1, column], place[row, column + 1], place[row + 1, column]]
    assert not weights[3][place[3, 0]].any()  # nothing is below the last row
    few = images.neighbours(12, 3, columns=8)
    assert [pattern.offset for pattern in few.patterns] == [-1, -8, 1]


def test_classes_are_read_from_the_mean_of_all_tokens():
    """In a model without attention each token counts equally: an image's logits are the mean over its tokens."""
    model = images.build(images.case("identity", **TINY), generator())
    pixels = torch.rand(2, 1, 8, 8, generator=generator(1))
    with torch.no_grad():
        each = model.encode(pixels) @ model.weight_head.T + model.bias_head
        torch.testing.assert_close(model(pixels), each.mean(1), rtol=0, atol=1e-5)  # rounding of results of size 1
        assert (model(pixels) - each[:, 0]).abs().max() > 1e-2


def test_training_is_learnt_from():
    case = images.case("1 learned + 3 positional", 3, 1e-2, steps=120)
    outcome = images.run(case)
    losses = [look["loss_nats"] for look in outcome["facts"]["validation"]]
    assert min(losses) < 1 < outcome["facts"]["loss"][0]  # a guess has log 10 = 2.3
    # A tenth of as many guesses is right, and with probability 1 - 1e-5 no more than this share.
    assert outcome["repetitions"]["test"]["correct_fraction"][0] > 0.1 + SIGMAS * (0.09 / case["tested"]) ** 0.5


def test_photographs_are_learnt_by_the_same_code(monkeypatch):
    """Noise with as many classes stands in for CIFAR-10."""
    drawn = [
        Images(torch.randint(256, (30, 3, 32, 32), generator=generator(i), dtype=torch.uint8), torch.arange(30) % 10)
        for i in range(3)
    ]
    parts = dict(zip(("train", "validation", "test"), drawn, strict=True))
    task = classification("cifar10", "noise", classes=10, white=255, **parts)
    monkeypatch.setitem(images.DATA, "cifar10", images.DATA["cifar10"]._replace(task=lambda: task))
    for arm in images.ARMS:
        record = measure(EXPERIMENTS["images"], images.case(arm, 1, data="cifar10", **TINY), "cpu")
        assert record["configuration"]["N"] == 65
    sizes = images.case("learned", device="cuda", data="cifar10")
    assert sizes["d"] > images.case("learned", device="cuda")["d"] > images.case("learned")["d"]
    for device, data in (("cpu", ["digits"]), ("cuda", ["digits", "cifar10"])):
        assert list(dict.fromkeys(case["data"] for case in images.cases(device))) == data


def test_the_rule_and_as_many_digits_as_are_tested():
    case = images.case("learned")
    assert (case["decision_margin"], case["decision_level"], case["decision_higher_is_better"]) == (0.01, 0.05, True)
    for draw in (digits().validation, digits().tests["test"]):
        assert len(draw(case["tested"], generator()).answers) == case["tested"]
    with pytest.raises(ValueError, match=f"count: expected at most {case['tested']}, all examples"):
        digits().validation(case["tested"] + 1, generator())  # all of them
