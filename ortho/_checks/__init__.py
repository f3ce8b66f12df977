"""Checks of what a caller hands in: every error names the argument, what came, and what was expected."""

from ortho._checks.arguments import all_checked as all_checked
from ortho._checks.arguments import checked as checked
from ortho._checks.names import unknown as unknown
from ortho._checks.values import FORMS as FORMS
from ortho._checks.values import describe as describe
from ortho._checks.values import expect as expect
from ortho._checks.values import finite as finite
from ortho._checks.values import float_tensor as float_tensor
from ortho._checks.values import heads as heads
from ortho._checks.values import indices as indices
from ortho._checks.values import layer_mask as layer_mask
from ortho._checks.values import mask as mask
from ortho._checks.values import one_of as one_of
from ortho._checks.values import positive_int as positive_int
from ortho._checks.values import qkv as qkv
from ortho._checks.values import reads_values as reads_values
from ortho._checks.values import scale_factor as scale_factor
from ortho._checks.values import sequence as sequence
from ortho._checks.values import share as share
from ortho._checks.values import shows_values as shows_values
from ortho._checks.values import state as state
from ortho._checks.values import unchecked_values as unchecked_values
from ortho._checks.values import within as within
