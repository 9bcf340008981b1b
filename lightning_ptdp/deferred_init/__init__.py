"""Deferred initialisation: a module is built without values, and a rank then computes those that it owns.

While `configure_model` runs, `recorder` puts tensors on the meta device and logs what would be done to them (`log`).
`illusion` makes them look like tensors of the host to code that asks. `deferred` has what a run calls.
"""

from lightning_ptdp.deferred_init.deferred import DeferredInit

__all__ = ["DeferredInit"]
