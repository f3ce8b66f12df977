"""Drawing tokens: top-k, top-p, ends, padded batches. Beam search, compared with all sequences and with lists."""

from functools import partial
from itertools import product
from math import inf

import pytest
import torch
from refusals import refuses
from seeded import generator

from ortho import LanguageModel
from ortho.models.encoder_decoder import EncoderDecoder
from ortho.models.generation import beam_search, next_token, penalty

START, STOP = 1, 2


def scores(ours, source, mask, vocab, most, alpha):
    """The score of every sequence that ends within `most` tokens, and of every one of that length that does not."""
    free = [token for token in range(vocab) if token != STOP]
    found = {}
    for length in range(1, most + 1):
        last = [STOP] if length < most else range(vocab)
        written = torch.tensor([(START, *w, end) for w in product(free, repeat=length - 1) for end in last])
        rows = len(written)
        logits = ours(source.expand(rows, -1), written[:, :-1], mask.expand(rows, -1)).log_softmax(-1)
        totals = logits.gather(-1, written[:, 1:, None]).sum((1, 2)) / penalty(length, alpha)
        found |= zip(map(tuple, written[:, 1:].tolist()), totals.tolist(), strict=True)
    return found


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_as_many_beams_as_there_are_prefixes_search_all(alpha):
    vocab, most = 4, 4
    ours = EncoderDecoder(vocab, 8, 2, 1, max_length=most, dtype=torch.float64, generator=generator())
    with torch.no_grad():
        for i, parameter in enumerate(ours.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator(i), dtype=parameter.dtype))
    source = torch.randint(vocab, (5, 3), generator=generator())
    mask = torch.arange(3) < torch.tensor([3, 2, 1, 3, 3])[:, None]
    beams = (vocab - 1) ** (most - 1) * vocab
    got = ours.beam_search(source, mask, beams=beams, start=START, stop=STOP, max_length=most, length_penalty=alpha)
    found = set()
    for b in range(5):
        every = scores(ours, source[b : b + 1], mask[b : b + 1], vocab, most, alpha)
        best = max(every, key=every.get)
        assert (*got[b].tolist(), *([STOP] * most))[:most] == (*best, *([STOP] * most))[:most]
        found.add(best)
    assert len(found) > 2


def test_the_penalty_of_a_length():
    """The penalty is ((5 + length) / 6)^alpha: 1 for a single token, and 1 with alpha 0."""
    assert penalty(1, 0.6) == penalty(9, 0.0) == 1
    assert penalty(7, 1.0) == penalty(19, 0.5) == 2


def table(vocab, depth, seed):
    """Log-probabilities that depend on the last two tokens and on the place."""
    logits = torch.randn(depth, vocab, vocab, vocab, generator=generator(seed), dtype=torch.float64) * 1.5

    def following(written):
        before = written[:, -2] if written.shape[1] > 1 else torch.zeros_like(written[:, -1])
        return logits[written.shape[1] - 1, before, written[:, -1]].log_softmax(-1)

    return following


def by_lists(following, beams, most, alpha, vocab):
    """The same search for one row, in plain Python."""
    live, places, best = [((START,), 0.0)], beams, (-inf, ())
    for length in range(1, most + 1):
        if not live:
            break
        rows = following(torch.tensor([w for w, _ in live])).tolist()
        further = [((*w, k), total + row[k]) for (w, total), row in zip(live, rows, strict=True) for k in range(vocab)]
        further = sorted(further, key=lambda pair: -pair[1])[:places]
        done = [(total / penalty(length, alpha), w) for w, total in further if w[-1] == STOP or length == most]
        best = max([best, *done])
        live = [(w, total) for w, total in further if w[-1] != STOP]
        places = beams - sum(w[-1] == STOP for w, _ in further) - (beams - places)
    return best


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
@pytest.mark.parametrize("beams", [1, 2, 3, 5])
def test_beam_search_is_the_one_written_with_lists(beams, alpha):
    vocab, most, lengths = 5, 6, set()
    for seed in range(20):
        following = table(vocab, most, seed)
        found = beam_search(following, 1, beams=beams, start=START, stop=STOP, max_length=most, length_penalty=alpha)
        score, wanted = by_lists(following, beams, most, alpha, vocab)
        assert tuple(found.tokens[0].tolist()) == wanted[1:]
        assert abs(float(found.scores) - score) <= 1e-12  # sums of six numbers of about 1
        lengths.add(len(wanted) - 1)
    assert len(lengths) > 2


# -- drawing


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
        ({"top_p": 0.35}, [1, 0, 0, 0]),  # the likeliest alone has as much
        ({"top_p": 0.45}, [4 / 7, 3 / 7, 0, 0]),  # the likeliest alone has less
        ({"top_p": 1.0}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 3, "top_p": 0.7}, [4 / 7, 3 / 7, 0, 0]),  # among three tokens, 4/9 and 3/9 are .78
        ({"top_p": 0.6, "temperature": 0.5}, [16 / 25, 9 / 25, 0, 0]),  # at that temperature .53 and .3
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
    """Also where a sequence is cut. The tokens in the padding make no difference."""
    model = language_model(positions=positions)
    tokens, padded = prompts(6, 3, 5, side=side)
    logits = model(tokens, key_padding_mask=padded)
    for row, own in enumerate(padded):
        alone = model(tokens[row : row + 1, ~own])[0]
        torch.testing.assert_close(logits[row, ~own], alone, atol=1e-10, rtol=1e-10)
    _, state = model(tokens[:, :4], key_padding_mask=padded[:, :4], return_state=True)
    rest = model(tokens[:, 4:], key_padding_mask=padded, initial_state=state)
    torch.testing.assert_close(rest[~padded[:, 4:]], logits[:, 4:][~padded[:, 4:]], atol=1e-10, rtol=1e-10)
    other = model(torch.where(padded, 0, tokens), key_padding_mask=padded)
    torch.testing.assert_close(other[~padded], logits[~padded], atol=1e-10, rtol=1e-10)


def test_an_encoder_decoder_draws_as_well():
    ours = EncoderDecoder(11, 8, 2, 1, max_length=9, dtype=torch.float64, generator=generator()).eval()
    source, ends = torch.randint(11, (3, 5), generator=generator()), {"start": START, "stop": STOP}
    greedy = ours.generate(source, **ends)
    assert torch.equal(ours.generate(source, **ends, temperature=1.0, top_k=1), greedy)
    one, again, other = (ours.generate(source, **ends, temperature=2.0, generator=generator(s)) for s in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)


@pytest.mark.bad_input
def test_errors():
    model, (tokens, padded) = language_model(), prompts(6, 2, side="left")
    beside = partial(model, tokens, key_padding_mask=padded, caches=model.new_caches())
    source = torch.zeros(1, 2, dtype=torch.long)
    ours = EncoderDecoder(11, 8, 2, 1, max_length=9)
    for call, message in (
        (lambda: model.generate(tokens, 2, temperature=-1.0), "temperature: expected a number of at least 0, got -1.0"),
        (lambda: model.generate(tokens, 2, top_p=0.0), r"top_p: expected a number in \(0, 1\], got 0.0"),
        (lambda: ours.generate(source, start=1, stop=2, top_p=1.5), r"top_p: expected a number in \(0, 1\], got 1.5"),
        (lambda: model.generate(tokens, 2, top_k=0), "top_k: expected an integer of at least 1.*, got 0"),
        (lambda: model.generate(tokens, 2, stop=11), "stop: expected an index in 0..10, got 11"),
        (lambda: model.generate(tokens, 12), "tokens: expected at most 16 positions, got 17"),
        (
            lambda: model.generate(tokens, 2, key_padding_mask=padded[:, :3]),
            r"key_padding_mask: expected shape \(2, 6\)",
        ),
        (
            lambda: model.generate(tokens, 2, key_padding_mask=padded | True),
            "key_padding_mask: expected a token in each",
        ),
        (lambda: model(tokens, key_padding_mask=padded[:, :3]), r"key_padding_mask: expected shape \(2, 6\), got"),
        (beside, "caches: expected None beside initial_state, return_state or key_padding_mask"),
    ):
        refuses(message, call)


@pytest.mark.parametrize("padded", [False, True])
def test_tokens_keep_their_dtype(padded):
    model = LanguageModel(11, 8, 2, num_layers=1, max_length=8, generator=generator(1))
    tokens = torch.zeros(2, 4, dtype=torch.int32)
    mask = torch.zeros(2, 4, dtype=torch.bool) if padded else None
    assert model.generate(tokens, 2, key_padding_mask=mask).dtype == torch.int32


def test_a_state_of_another_number_of_blocks_is_refused():
    model = LanguageModel(11, 8, 2, num_layers=2, max_length=8, generator=generator(1))
    token = torch.zeros(1, 1, dtype=torch.long)
    refuses(r"^initial_state: expected the number of tokens read and 2 states", model, token, initial_state=(0, []))
