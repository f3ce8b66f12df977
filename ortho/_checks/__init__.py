"""What surrounds the formulas: checks of a caller's arguments, clean operands, and what compilers may do.

Every error names the argument, what was passed, and what was expected.
"""

from ortho._checks.arguments import all_checked as all_checked
from ortho._checks.arguments import checked as checked
from ortho._checks.autocast import no_autocast as no_autocast
from ortho._checks.names import unknown as unknown
from ortho._checks.operands import absent_keys as absent_keys
from ortho._checks.operands import attention_form as attention_form
from ortho._checks.operands import carried as carried
from ortho._checks.operands import check_growth as check_growth
from ortho._checks.operands import gate as gate
from ortho._checks.operands import key_mask as key_mask
from ortho._checks.operands import known_tokens as known_tokens
from ortho._checks.operands import mask_of_keys as mask_of_keys
from ortho._checks.operands import past_length as past_length
from ortho._checks.operands import prepend_state as prepend_state
from ortho._checks.operands import upcast as upcast
from ortho._checks.transforms import Kernel as Kernel
from ortho._checks.transforms import no_forward_derivative as no_forward_derivative
from ortho._checks.transforms import once as once
from ortho._checks.transforms import transformed as transformed
from ortho._checks.transforms import uncompiled as uncompiled
from ortho._checks.transforms import untransformed as untransformed
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
