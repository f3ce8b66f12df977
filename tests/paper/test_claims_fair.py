"""Like statements have like verdicts."""

import pytest

from paper.claims import ledger

# Statements that several claims, or parts of them, make: (claim, label of the part).
SAME = {
    "the softmax of the scores takes O(N^2)": (
        ("S0.1.1b", "softmax"),
        ("S1.1.1a", "softmax"),
        ("S2.3.1a", "softmax, time"),
        ("S3.1d", "softmax"),
    ),
    "the products with N x N weights take O(N^2 d)": (
        ("S0.1.1b", "times $V$"),
        ("S1.1.1a", "$A V$"),
        ("S2.2.1a", "from the left"),
        ("S3.1d", "both products"),
        ("S4.2a", "with softmax"),
    ),
    "Q (K^T V) takes O(N d^2)": (
        ("S1.2.2a", "time"),
        ("S2.2.1a", "from the right"),
        ("S4.2a", "without"),
    ),
    "O(N d^2) is less than O(N^2 d), for long sequences alone": (
        ("S3.2c", "for all tokens, $d = 64$"),
        ("S4.2a", "lower, $d = 64$"),
    ),
    "linear attention keeps O(N d)": (("S0.3.1d", "space"), ("S1.2.2a", "space")),
    "scores take N^2": (("S1.1.1b", "scores"), ("S2.3.1a", "similarity, space")),
    "a window needs space for its pairs": (
        ("S1.2.3a", "space of the sparse matrix"),
        ("S1.2.4a", "space of the weights"),
        ("S1.4.2a", "space of the weights"),
    ),
    "sums over the past are products with a state": (
        ("S3.2a", "outputs that differ, in fractions"),
        ("S3.2b", "outputs that differ from the sums, in fractions"),
    ),
    "a window of w takes O(N w d)": (
        ("S1.2.3a", "time, local, $N = k + m$"),
        ("S1.4.2a", "time, $N = w + m$"),
        ("S2.2.3d", "local"),
    ),
    "pairs can be chosen by content": (
        ("S1.2.3b", "kept pairs that differ between two inputs"),
        ("S4.4a", "kept pairs that differ between two inputs"),
    ),
    "a pattern in tiles takes fewer products": (("S4.1b", "in parts"), ("S4.1c", "fewer products")),
    "Huber's loss errs less where there are outliers": (("S3.3g", "with outliers"), ("S3.3l", "others may be better")),
}


@pytest.mark.parametrize("statement", SAME)
def test_like_statements_have_like_verdicts(statement):
    found = [{name: verdict for name, verdict, *_ in ledger()[claim].parts}[part] for claim, part in SAME[statement]]
    assert len(found) > 1 == len(set(found)), found
