"""All operations of the library."""

from lightning_ptdp.kernels import activation, cross_entropy, dropout_add, multi_tensor, norm, rotary, softmax

OPERATIONS = (
    *softmax.OPS,
    *norm.OPS,
    *activation.OPS,
    *dropout_add.OPS,
    *rotary.OPS,
    *cross_entropy.OPS,
    *multi_tensor.OPS,
)
