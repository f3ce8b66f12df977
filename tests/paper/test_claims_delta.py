"""Evidence on the delta rule, its gates and positions: its figures against others found independently."""

from paper.claims.shared import gates_and_losses as forms

# ------------------------------------------------------------------------------------------------- Gains in the records

BEYOND = ("tokens 17 to 32", "tokens 33 to 64", "tokens 65 to 128")


def records(product, one, device="cpu-x"):
    """Records with given shares of right answers by arm, as the experiment stores them, the longest test first."""
    for arm, shares in (("delta-product", product), ("delta, beta to 2", one)):
        for seed, share in enumerate(shares, 1):
            answered = {**dict.fromkeys(reversed(BEYOND), share), "tokens 1 to 16": 1.0}
            tests = {t: {"correct_fraction": [x], "faultless_fraction": [x]} for t, x in answered.items()}
            case = {"arm": arm, "seed": seed, "rate": 1e-2}
            yield {"experiment": "permutations", "device": device, "configuration": case, "repetitions": tests}


HIGH, LOW = (0.9, 0.92, 0.94, 0.96, 0.98), (0.3, 0.31, 0.32, 0.33, 0.34)
ARMS = ("permutations", "delta-product", "delta, beta to 2", BEYOND)


def test_the_interval_of_a_gain_by_hand(stored):
    """With three tests, each end may leave out two of the 25 differences: 4 of 252 choices have fewer than three."""
    stored(permutations=list(records(HIGH, LOW)))
    gains = forms.gained(*ARMS)
    assert list(gains) == [f"{test} on cpu-x" for test in BEYOND]
    assert set(gains.values()) == {(58.0, 66.0)}  # of the differences 56, 57, 58, ... 66, 67, 68
    stored(permutations=[*records(HIGH, LOW), *records(HIGH, LOW, "cuda-y")])
    assert set(forms.gained(*ARMS).values()) == {(57.0, 67.0)}
