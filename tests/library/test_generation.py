"""Drawing tokens: top-k, top-p, ends, padded batches."""

import pytest
import torch
from seeded import generator

from ortho import LanguageModel
from ortho.models.encoder_decoder import EncoderDecoder
from ortho.models.generation import next_token

START, STOP = 1, 2


def drawn_shares(chances, count=20_000, **kwargs):
    """The share of the draws that each token has."""
    rows = torch.tensor(chances, dtype=torch.float64).log().expand(count, -1)
    return next_token(rows, generator=generator(), **kwargs).flatten().bincount(minlength=len(chances)) / count


@pytest.mark.parametrize(
    ("kwargs", "wanted"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.0, "top_k": 1}, [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_what_is_left_to_draw_from(kwargs, wanted):
    """Tokens are drawn in their shares: each of 40 shares is wrong by 4.5 standard errors, .016, with probability 1e-5.
    Tokens left out are never drawn. Another order of the tokens gives the same."""
    found, wanted = drawn_shares([0.4, 0.3, 0.2, 0.1], **kwargs), torch.tensor(wanted)
    assert (found - wanted).abs().max() < 0.016
    assert (found[wanted == 0] == 0).all()
    turned = drawn_shares([0.1, 0.4, 0.2, 0.3], **kwargs)[[1, 3, 2, 0]]
    assert (turned - wanted).abs().max() < 0.016


def test_tokens_as_likely_as_the_last_of_the_k_stay():
    assert (drawn_shares([0.4, 0.2, 0.2, 0.2], top_k=2) > 0.15).all()


def language_model(attention="softmax", **kwargs):
    """A model with weights so large that no two logits are close, but in which tokens do not follow themselves."""
    kwargs = {"max_length": 16, **kwargs}
    made = LanguageModel(11, 8, 2, 2, attention=attention, generator=generator(), dtype=torch.float64, **kwargs)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(made.named_parameters()):
            size = 0.1 if name == "embed_tokens" else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator(i), dtype=torch.float64) * size)
    return made


def prompts(*lengths, side, width=6):
    """Tokens, padded to a width on a side, and where padding is; "within" leaves a gap after the first token."""
    tokens = torch.randint(1, 11, (len(lengths), width), generator=generator(3))
    places, counts = torch.arange(width), torch.tensor(lengths)[:, None]
    there = {
        "right": places < counts,
        "left": places >= width - counts,
        "within": (places == 0) | (places > width - counts),
    }[side]
    return tokens, ~there


@pytest.mark.parametrize("attention", ["softmax", "delta", "rotary"])
@pytest.mark.parametrize("side", ["right", "left", "within"])
def test_a_padded_batch_is_its_rows_alone(side, attention):
    model = language_model(attention)
    tokens, padded = prompts(6, 2, 4, 2, side=side)
    for stop in (None, 5):
        found = model.generate(tokens, 7, temperature=0.0, stop=stop, key_padding_mask=padded)
        assert torch.equal(found[:, :6], tokens)
        longest = 0
        for row, own in enumerate(padded):
            alone = model.generate(tokens[row : row + 1, ~own], 7, temperature=0.0, stop=stop)[0, int((~own).sum()) :]
            assert torch.equal(found[row, 6 : 6 + len(alone)], alone)
            assert (found[row, 6 + len(alone) :] == (stop or 0)).all()
            longest = max(longest, len(alone))
        assert found.shape[1] == 6 + longest


def test_rows_of_one_length_are_drawn_together():
    """The shortest come first: the generator draws for one batch of equal lengths after the other."""
    model, (tokens, padded) = language_model(), prompts(6, 3, 6, 3, side="left")
    found = model.generate(tokens, 4, key_padding_mask=padded, generator=generator(5))
    g = generator(5)
    short, long = (model.generate(rows, 4, generator=g) for rows in (tokens[[1, 3], 3:], tokens[[0, 2]]))
    assert torch.equal(found[[1, 3], 6:], short[:, 3:]) and torch.equal(found[[0, 2], 6:], long[:, 6:])


def test_a_row_ends_with_the_stop():
    """The row is filled up with the stop; other rows go on as before; when all have ended, nothing more is drawn."""
    model = language_model()
    tokens = torch.randint(11, (8, 3), generator=generator(1))
    plain = model.generate(tokens, 9, temperature=0.0)[:, 3:]
    assert len(plain.unique()) > 3
    stop = int(plain[0, 1])
    found = model.generate(tokens, 9, temperature=0.0, stop=stop)[:, 3:]
    ends = [row.index(stop) + 1 if stop in row else 9 for row in plain.tolist()]
    assert found.shape[1] == max(ends) and len(set(ends)) > 1
    for row, end in enumerate(ends):
        assert torch.equal(found[row, :end], plain[row, :end]) and (found[row, end:] == stop).all()
    assert model.generate(tokens[:1], 9, temperature=0.0, stop=stop).shape == (1, 3 + ends[0])


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("side", ["right", "left", "within"])
def test_padding_in_a_language_model_is_as_good_as_absent(side, positions):
    """The tokens in the padding make no difference."""
    model = language_model(positions=positions)
    tokens, padded = prompts(6, 3, 5, side=side)
    logits = model(tokens, key_padding_mask=padded)
    for row, own in enumerate(padded):
        alone = model(tokens[row : row + 1, ~own])[0]
        torch.testing.assert_close(logits[row, ~own], alone, atol=1e-10, rtol=1e-10)
    other = model(torch.where(padded, 0, tokens), key_padding_mask=padded)
    torch.testing.assert_close(other[~padded], logits[~padded], atol=1e-10, rtol=1e-10)


def test_an_encoder_decoder_draws_as_well():
    ours = EncoderDecoder(11, 8, 2, 1, max_length=9, dtype=torch.float64, generator=generator()).eval()
    source, ends = torch.randint(11, (3, 5), generator=generator()), {"start": START, "stop": STOP}
    greedy = ours.generate(source, **ends)
    assert torch.equal(ours.generate(source, **ends, temperature=1.0, top_k=1), greedy)
    one, again, other = (ours.generate(source, **ends, temperature=2.0, generator=generator(s)) for s in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)


@pytest.mark.parametrize("padded", [False, True])
def test_tokens_keep_their_dtype(padded):
    model = LanguageModel(11, 8, 2, num_layers=1, max_length=8, generator=generator(1))
    tokens = torch.zeros(2, 4, dtype=torch.int32)
    mask = torch.zeros(2, 4, dtype=torch.bool) if padded else None
    assert model.generate(tokens, 2, key_padding_mask=mask).dtype == torch.int32
