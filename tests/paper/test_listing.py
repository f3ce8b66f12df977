"""Code on a page is the code that runs, without the parts that the page gives in words."""

from functools import wraps

from ortho.attention.softmax.softmax_attention import softmax_attention_reference
from paper.listing import listing


def passed_on(function):
    @wraps(function)
    def outer(*args, **kwargs):
        return function(*args, **kwargs)

    return outer


@passed_on
def scaled(x: float, *, by: float = 2.0) -> float:
    """A number, multiplied."""
    # Why it is so.
    return x * by  # a product


def many(first_of_the_names, second_of_the_names, third_of_the_names, fourth_of_the_names=None, *others):
    return first_of_the_names


class Scale:
    def applied(self, x: float) -> float:
        return x * self.by


def test_docstring_decorators_and_annotations_are_left_out_and_comments_stay():
    assert listing(scaled).data.splitlines() == [
        "```python",
        "# tests/paper/test_listing.py",
        "def scaled(x, *, by=2.0):",
        "    # Why it is so.",
        "    return x * by  # a product",
        "```",
    ]


def test_long_signatures_are_wrapped_and_functions_stand_apart():
    lines = listing(many, scaled).data.splitlines()
    assert lines[2:5] == [
        "def many(first_of_the_names, second_of_the_names, third_of_the_names,",
        "         fourth_of_the_names=None, *others):",
        "    return first_of_the_names",
    ]
    assert lines[5:8] == ["", "# tests/paper/test_listing.py", "def scaled(x, *, by=2.0):"]


def test_a_method_stands_behind_the_name_of_its_class():
    assert listing(Scale.applied).data.splitlines()[1:] == [
        "# tests/paper/test_listing.py (Scale)",
        "def applied(self, x):",
        "    return x * self.by",
        "```",
    ]


def test_an_attention_function_shows_its_definition():
    assert listing(softmax_attention_reference).data.splitlines()[1:3] == [
        "# ortho/attention/softmax/softmax_attention.py",
        "def softmax_attention_reference(call):",
    ]
