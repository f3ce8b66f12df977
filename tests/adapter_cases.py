"""For each conversion and model: the result is right, or the conversion is refused and leaves the model unchanged.

python tests/adapter_cases.py       # prints the table
"""

import copy
import inspect
import io
import sys
import tempfile
import warnings
from itertools import cycle, islice

import torch
from adapter_models import LAYERS, MODELS, build, close, data, padded, run, tf

import ortho.adapters
from ortho import to_standard
from ortho.adapters import attention_layers, freeze_qk, set_heads, unfreeze_qk
from ortho.attention.sparse.window import Window

MIXED = ["learned", "previous", Window(3), "linear"]
SAME = ["learned", "stopped"]
NOT_THERE = "-"  # the outcome of a case that a model does not have


def state_of(model):
    """All that a conversion may change: values, classes, whether parameters are trained, the attention chosen."""
    values = {key: value.clone() for key, value in model.state_dict().items()}
    trained = {key: parameter.requires_grad for key, parameter in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]
    names = [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]
    own = [sorted(vars(module).keys() - {"_is_hf_initialized"}) for module in model.modules()]
    return values, trained, kinds, names, own


def same(one, other):
    values, others = one[0], other[0]
    equal = values.keys() == others.keys() and all(torch.equal(values[key], others[key]) for key in values)
    return equal and one[1:] == other[1:]


class WrongError(Exception):
    """A conversion that is neither right nor refused."""


class RefusedError(Exception):
    """A file that is refused at loading, with the reason."""


def ensure(holds, words):
    if not holds:
        raise WrongError(words)


def judged(case, name):
    """The outcome of a case for a model: "right", "refused: ...", "WRONG: ..." or `NOT_THERE`."""
    model = build(name)
    try:
        return case(name, model) or "right"
    except WrongError as wrong:
        return f"WRONG: {wrong}"
    except RefusedError as refused:
        return f"refused: at loading: {refused}"
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        whole = isinstance(error, ValueError | TypeError) and same(state_of(model), state_of(build(name)))
        return f"{'refused' if whole else 'WRONG'}: {type(error).__name__}: {error}"


def is_text(name):
    return tf is not None and MODELS[name][1] in ("text", "causal")


def cloned(model):
    return copy.deepcopy(model)


def rows_of(name, model):
    """Ensure, in some layers, that freezing a head draws its rows of W_Q and W_K and no others. This uses an
    invariance: no score changes if a head's queries are multiplied by a number and its keys divided by it."""
    state, found = model.state_dict(), attention_layers(model)
    ensure(len(found) == LAYERS.get(name, 2), f"{len(found)} attention layers of {LAYERS.get(name, 2)}")
    scaled, halves = ({key: value.clone() for key, value in state.items()} for _ in range(2))
    numbers = iter(torch.linspace(1.5, 3, 64).tolist())
    for i in sorted({0, len(found) - 1}):
        layer = found[i]
        shared = layer.num_heads // layer.num_kv_heads
        for first in range(0, layer.num_heads, shared):
            plain = to_standard(freeze_qk(cloned(model), heads={i: list(range(first, first + shared))}))
            changed = {key: value != state[key] for key, value in plain.state_dict().items()}
            changed = {key: where for key, where in changed.items() if where.any()}
            number, owners = next(numbers), {}
            for kind in ("weight", "bias"):
                drawn = []  # matrices and their rows; in a matrix of both, the queries' rows come first
                for key, where in changed.items():
                    if kind in key:
                        flat = where if where.dim() == 1 else where.any(1)
                        axis = int(flat.all())
                        rows = (where.any(0) if axis else flat).nonzero()[:, 0].tolist()
                        owner = owners.setdefault(key.replace(kind, ""), len(owners))
                        drawn += [(key, axis, row, owner) for row in rows]
                for at, (key, axis, row, owner) in enumerate(drawn):
                    second = owner if len(owners) == 2 else at >= shared * layer.head_dim
                    scaled[key].select(axis, row).mul_(1 / number if second else number)
                    if not second:
                        halves[key].select(axis, row).mul_(number)
    outputs = []
    for one in (state, scaled, halves):
        other = cloned(model)
        other.load_state_dict(one)
        outputs.append(run(other.eval(), data(name)))
    ensure(close(outputs[1], outputs[0]), "other rows than those of queries and keys")
    normed = any("norm" in child for layer in found for child, _ in layer.module.named_children())
    ensure(normed or not close(outputs[2], outputs[0]), "rows that nothing reads")


def gradients(model, given):
    model.zero_grad()
    output = run(model, given)
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def conversions(name, model):
    """Ensure what every converted model has to give: the same gradients with gradient checkpointing, if it supports it;
    the same output where autograd records nothing; and in bfloat16 finite outputs of that dtype."""
    model, given = cloned(model), data(name)
    want = run(model.eval(), given)
    if getattr(model, "supports_gradient_checkpointing", False):
        plain = gradients(model.train(), given)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        ensure(len(plain) > 4, "no gradients")
        ensure(all(close(a, b) for a, b in zip(gradients(model, given), plain, strict=True)), "checkpointing")
        model.gradient_checkpointing_disable()
        model.eval()
    with torch.no_grad():
        ensure(close(run(model, given), want), "inference")
        rough = run(cloned(model).bfloat16(), given)
        ensure(rough.dtype == torch.bfloat16 and rough.isfinite().all(), "bfloat16")


def continued(name, model):
    """The tokens that a model generates, which must be the same with a cache and without one."""
    kind = MODELS[name][1]
    if kind not in ("causal", "both", "speech"):
        return None
    given = {key: value for key, value in data(name).items() if "decoder" not in key}
    given = {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in given.items()}
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [model.eval().generate(**given, use_cache=use, **options) for use in (True, False)]
    ensure(torch.equal(*found), "a cache changes what is generated")
    return found[0]


def alone(name, model):
    """Ensure that the outputs with padding are those of the same tokens without it."""
    if not is_text(name):
        return
    model.eval()
    takes = inspect.signature(model.forward).parameters
    for side in ("right", "left"):
        given, there = padded(name, side)
        places = (there.cumsum(1) - 1).clamp(min=0)
        if "position_ids" in takes:
            given["position_ids"] = places + (name == "roberta")
        elif side == "left" and name in ("distilbert", "deberta", "deberta-v2"):
            continue  # their positions count the padding
        got = run(model, given)
        for i in range(3):
            own = {"input_ids": given["input_ids"][i : i + 1, there[i]]}
            if "position_ids" in given:
                own["position_ids"] = given["position_ids"][i : i + 1, there[i]]
            want = run(model, own)[0]
            ensure(close(got[i][there[i]], want), f"padding on the {side}")


def saved(name, model, loader):
    """The model from its files."""
    if tf is not None and isinstance(model, tf.PreTrainedModel):
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return loader(type(model), folder, dtype=model.dtype).eval()
    file = io.BytesIO()
    record = ortho.adapters.heads_record(model) if hasattr(ortho.adapters, "heads_record") else None
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = build(name, seed=4)
    if record is not None:
        ortho.adapters.restore(other, record)
    try:
        other.load_state_dict(torch.load(file, weights_only=True))
    except RuntimeError as error:
        raise RefusedError(" ".join(str(error).split())) from error
    return other.eval()


def quietly(cls, folder, **kwargs):
    """Load by the library's own loader or, for converted models, by ours."""
    own = getattr(ortho.adapters, "from_pretrained", lambda cls, *args, **kwargs: cls.from_pretrained(*args, **kwargs))
    return own(cls, folder, **kwargs)


def round_trip(name, model):
    want = run(model.eval(), data(name))
    other = saved(name, model, quietly)
    ensure(close(run(other, data(name)), want), "another function after loading")
    if hasattr(ortho.adapters, "heads_record"):
        record = ortho.adapters.heads_record(model)
        ensure(record and ortho.adapters.heads_record(other) == record, "heads are not what they were after loading")
    else:
        kinds = [type(module) for module in model.modules()]
        ensure(kinds == [type(module) for module in other.modules()], "frozen heads are trained after loading")


def frozen(name, model):
    """`freeze_qk` with the weights kept: outputs, padding, caches and gradients are those of the plain model."""
    plain, before = cloned(model).eval(), state_of(model)
    if name != "deberta-v2-relative":  # whose positions have queries and keys, too
        rows_of(name, model)
    freeze_qk(model, draw=None)
    inputs = [data(name)] + ([padded(name, side)[0] for side in ("left", "right")] if is_text(name) else [])
    for given in inputs:
        ensure(close(run(model.eval(), given), run(plain, given)), "other outputs")
    tokens = continued(name, model)
    ensure(tokens is None or torch.equal(tokens, continued(name, plain)), "other tokens")
    conversions(name, model)
    unfreeze_qk(model.train())
    ensure(same(state_of(model), before), "the way back")


def frozen_saved(name, model):
    """`freeze_qk` with drawn weights and stopped gradients, then saved to files and loaded."""
    round_trip(name, freeze_qk(model, stop_gradient=True, generator=torch.Generator().manual_seed(0)))


def kinds_of(model, kinds, layers=None):
    found = attention_layers(model)
    return {
        i: list(islice(cycle(kinds), found[i].num_heads)) for i in (range(len(found)) if layers is None else layers)
    }


def same_heads(name, model):
    """`set_heads` with learned and stopped heads keeps the plain model's outputs, and can be undone."""
    plain, before = cloned(model).eval(), state_of(model)
    set_heads(model, kinds_of(model, SAME))
    for given in [data(name)] + ([padded(name, side)[0] for side in ("left", "right")] if is_text(name) else []):
        there = given.get("attention_mask", torch.ones(()))[..., None].bool() if is_text(name) else torch.ones(())
        ensure(close(run(model.eval(), given) * there, run(plain, given) * there), "other outputs")
    tokens = continued(name, model)
    ensure(tokens is None or torch.equal(tokens, continued(name, plain)), "other tokens")
    conversions(name, model)
    to_standard(model)
    ortho.adapters.standard_heads(model.train())
    ensure(same(state_of(model), before), "the way back")


def mixed_heads(name, model):
    """`set_heads` with a learned, a positional, a window and a linear head."""
    set_heads(model, kinds_of(model, MIXED))
    alone(name, model)
    continued(name, model)
    conversions(name, model)
    round_trip(name, model)


def mixed_self(name, model):
    """Like `mixed_heads`, in the layers that attend to their own sequence and keep all keys."""
    layers = [i for i, layer in enumerate(attention_layers(model)) if not attends_elsewhere(layer.name)]
    if name == "gemma3":
        layers = layers[1:]
    elif len(layers) == len(attention_layers(model)):
        return NOT_THERE
    set_heads(model, kinds_of(model, MIXED, layers))
    continued(name, model)
    conversions(name, model)
    round_trip(name, model)
    return None


def attends_elsewhere(name):
    return any(word in name for word in ("cross", "EncDec", "encoder_attn", "multihead_attn"))


CASES = {
    "freeze_qk": frozen,
    "saved": frozen_saved,
    "set_heads, same": same_heads,
    "set_heads, mixed": mixed_heads,
    "mixed, self-attention": mixed_self,
}


def main():
    """Print the table, or some of its rows."""
    warnings.simplefilter("ignore")
    if tf is not None:
        tf.utils.logging.set_verbosity_error()
        tf.utils.logging.disable_progress_bar()
    print("| model |", " | ".join(CASES), "|")
    print("|---|" + "---|" * len(CASES))
    notes = {}
    for name in sys.argv[1:] or MODELS:
        cells = [judged(case, name) for case in CASES.values()]
        for case, cell in zip(CASES, cells, strict=True):
            if ":" in cell:
                notes.setdefault(cell, []).append(f"{name}, {case}")
        print(f"| {name} |", " | ".join(cell.partition(":")[0] for cell in cells), "|", flush=True)
    for note, where in notes.items():
        print(f"- {'; '.join(where)}: {note}")


if __name__ == "__main__":
    main()
