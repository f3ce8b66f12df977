"""For each case and model: the conversion is right, or it is refused and leaves the model unchanged."""

import copy
import tempfile

import torch
from adapter_models import LAYERS, MODELS, build, close, data, padded, run, tf

from ortho.adapters import attention_layers, freeze_qk, to_standard, unfreeze_qk


def state_of(model):
    """All that a conversion may change: values, classes, whether parameters are trained, attributes, hooks."""
    values = {key: value.clone() for key, value in model.state_dict().items()}
    trained = {key: parameter.requires_grad for key, parameter in model.named_parameters()}
    kinds = [type(module).__qualname__ for module in model.modules()]
    own = [sorted(vars(module).keys() - {"_is_hf_initialized"}) for module in model.modules()]
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    return values, trained, kinds, own, hooks


def same(one, other):
    values, others = one[0], other[0]
    equal = values.keys() == others.keys() and all(torch.equal(values[key], others[key]) for key in values)
    return equal and one[1:] == other[1:]


class WrongError(Exception):
    """A conversion that is neither right nor refused."""


def ensure(holds, words):
    if not holds:
        raise WrongError(words)


def judged(case, name):
    """The outcome of a case for a model: "right", "refused: ..." or "WRONG: ..."."""
    model = build(name)
    try:
        case(name, model)
    except WrongError as wrong:
        return f"WRONG: {wrong}"
    except Exception as error:
        whole = isinstance(error, ValueError) and same(state_of(model), state_of(build(name)))
        return f"{'refused' if whole else 'WRONG'}: {type(error).__name__}: {error}"
    return "right"


def is_text(name):
    return tf is not None and MODELS[name][1] in ("text", "causal")


def given(name):
    """The inputs by which layers are tried out, where those that are made up do not reach them."""
    return data(name) if name in ("qwen2-vl", "known beside unknown") else None


def spied(model, inputs):
    """The first call (query, key, value) of the attention that a model of transformers chooses by name; or None."""
    calls = []

    def spy(module, query, key, value, attention_mask, **kwargs):
        calls.append((query, key, value))
        return tf.AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **kwargs)

    if tf is None or not isinstance(model, tf.PreTrainedModel):
        return None
    tf.AttentionInterface.register("spy", spy)
    tf.AttentionMaskInterface.register("spy", tf.AttentionMaskInterface()["sdpa"])
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("spy")
        run(model, inputs)
    except ValueError:  # it has no such choice
        return None
    finally:
        model.set_attn_implementation(before)
    return calls[0] if calls else None


def step(model, inputs):
    """A loss's gradients, then a step of a fused optimiser with weight decay."""
    model.zero_grad()
    output = run(model, inputs)
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=True).step()
    return gradients


def rows(layer):
    """The rows of queries and keys: those of each matrix and each bias."""
    parts = [(part.value().detach().movedim(part.axis, 0), part.rows.values()) for part in layer.parts()]
    return [value[own] for value, every in parts for own in every or [slice(None)]]


def ensure_drawn(layer):
    """Queries and keys have orthonormal matrices, each of its own, and no bias."""
    matrices = [own for own in rows(layer) if own.dim() > 1]
    for own in matrices:
        small = own @ own.T if own.shape[0] <= own.shape[1] else own.T @ own
        ensure(close(small, torch.eye(len(small), dtype=small.dtype)), "rows that are not orthonormal")
    one, other = matrices[0][0], matrices[-1][0]
    ensure(not torch.equal(one[: len(other)], other[: len(one)]), "the same matrix twice")
    ensure(not any(own.any() for own in rows(layer) if own.dim() == 1), "a bias beside a draw")


def frozen(name, model, stop_gradient=False):
    """With the weights kept: outputs, gradients and tokens are those of the plain model; a fused optimiser moves no
    frozen row, and all that was trained beside them; a draw changes no value; and the ways back."""
    inputs, plain, before = data(name), copy.deepcopy(model).eval(), state_of(model)
    freeze_qk(model.eval(), draw=None, stop_gradient=stop_gradient, inputs=given(name))
    layers = attention_layers(model)
    ensure(len(layers) == LAYERS.get(name, 2), f"{len(layers)} attention layers")
    for each in [inputs] + ([padded(name, side)[0] for side in ("left", "right")] if is_text(name) else []):
        ensure(close(run(model, each), run(plain, each)), "other outputs")
    restored = unfreeze_qk(copy.deepcopy(model).train())
    ensure(same(state_of(restored), before), "the way back")
    drawn = copy.deepcopy(model)
    freeze_qk(drawn, stop_gradient=stop_gradient, inputs=given(name), generator=torch.Generator().manual_seed(0))
    for layer in attention_layers(drawn):
        ensure_drawn(layer)
    ensure(close(run(to_standard(drawn), inputs), run(drawn, inputs)), "other outputs of the standard model")
    calls = [spied(one, inputs) for one in (model, drawn)]
    if None not in calls:
        (q, k, v), (new_q, new_k, new_v) = calls
        ensure(close(v, new_v), "values that a draw has changed")
        ensure(not close(q, new_q) and not close(k, new_k), "queries and keys that no draw has changed")
    kept = [[own.clone() for own in rows(layer)] for layer in layers]
    own, theirs = step(model, inputs), step(plain, inputs)
    for layer, old in zip(layers, kept, strict=True):
        ensure(all(map(torch.equal, rows(layer), old)), "frozen rows moved")
    ensure(len(own) > 2 or len(theirs) < 6, "nothing is trained")
    ensure(stop_gradient or all(close(own[key], theirs[key]) for key in own.keys() & theirs.keys()), "other gradients")


def stopped(name, model):
    """The same with stopped gradients; the gradients are those of a plain model with constant queries and keys."""
    frozen(name, copy.deepcopy(model), stop_gradient=True)
    plain = copy.deepcopy(model).eval()
    freeze_qk(model.eval(), draw=None, stop_gradient=True, inputs=given(name))
    if isinstance(attention_layers(plain)[0].module, torch.nn.MultiheadAttention):
        return  # which reads its weights itself: test_adapters.py has the definition
    for layer in attention_layers(plain):
        for part in layer.parts():
            if part.name == "weight":
                chosen = torch.zeros(part.value().shape[part.axis], dtype=torch.bool)
                chosen[[row for own in part.rows.values() for row in own]] = True
                part.owner.register_forward_hook(lambda _, __, y, chosen=chosen: torch.where(chosen, y.detach(), y))
    own, theirs = step(model, data(name)), step(plain, data(name))
    ensure(all(close(own[key], theirs[key]) for key in own.keys() & theirs.keys()), "other gradients")


def not_trained(model):
    return {key for key, p in model.named_parameters() if not p.requires_grad}


def saved(name, model):
    """Two lines: `to_standard(model).save_pretrained(...)`, then `freeze_qk(loaded, draw=None)`."""
    plain = not_trained(model)
    freeze_qk(model.eval(), inputs=given(name))
    want, standard = run(model, data(name)), to_standard(model)
    if tf is not None and isinstance(model, tf.PreTrainedModel):
        with tempfile.TemporaryDirectory() as folder:
            standard.save_pretrained(folder)
            loaded = type(model).from_pretrained(folder, dtype=model.dtype)
    else:
        loaded = build(name, seed=4)
        loaded.load_state_dict(standard.state_dict())
    before = not_trained(loaded)
    freeze_qk(loaded.eval(), draw=None, inputs=given(name))
    ensure(close(run(loaded, data(name)), want), "another function after loading")
    ensure(not_trained(model) - plain == not_trained(loaded) - before, "other weights are frozen after loading")


CASES = {"frozen": frozen, "stopped": stopped, "saved": saved}
