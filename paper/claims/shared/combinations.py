"""Frozen orthogonal queries and keys with other attention (S2, section 5.3), and linear attention elsewhere (S4)."""

LINEAR, SOFTMAX = "linear", "learned"
KERNELS = (LINEAR, "FAVOR+")  # linear arms that see images
