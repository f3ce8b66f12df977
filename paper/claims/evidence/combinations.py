"""Frozen orthogonal queries and keys with other attention (S2, section 5.3), and linear attention elsewhere (S4)."""

CHAPTER = "32-combinations"


# ---------------------------- linear attention in other fields, and whether it is fit for all tasks with long sequences

LINEAR, SOFTMAX = "linear", "learned"
KERNELS = (LINEAR, "FAVOR+")  # linear arms that see images
