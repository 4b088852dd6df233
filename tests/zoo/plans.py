"""The plans every network of the zoo is trained under, and which of them a default run takes."""

PLANS = {
    "data": {"data": 3, "microbatches": 2},
    "zero 1": {"data": 4, "zero": 1},
    "zero 2": {"data": 2, "zero": 2, "microbatches": 2},
    "zero 3": {"data": 4, "zero": 3},
    "tensor": {"tensor": 2},
    "dots": {"remat": "dots"},
    "full": {"data": 2, "remat": "full"},
    "pipeline": {"pipeline": 2, "microbatches": 2},
    "pipeline and zero": {"data": 2, "pipeline": 2, "microbatches": 2, "zero": 1},
    "pipeline and tensor": {"pipeline": 2, "tensor": 2, "microbatches": 2, "schedule": "zb-h1"},
    "tensor and zero": {"data": 2, "tensor": 2, "zero": 3},
    "everything": {"data": 2, "tensor": 2, "zero": 2, "microbatches": 2, "remat": "full"},
    "members": {"member": 2, "chunk": 1, "batch_dim": "major"},
    "members minor": {"chunk": 2, "batch_dim": "minor"},
    "members and zero": {"member": 2, "data": 2, "zero": 1, "chunk": 1},
}
"""Name: the fields of the plan; rules are the model's."""


DEFAULT = {
    "data": ("contrastive",),
    "zero 1": ("recommender", "batch norm"),
    "zero 2": ("pinn", "unet"),
    "zero 3": ("gru",),
    "tensor": ("equilibrium", "vision transformer"),
    "dots": ("bilstm",),
    "full": ("graph", "experts"),
    "pipeline": ("autoregressive",),
    "pipeline and zero": ("spiking",),
    "pipeline and tensor": ("diffusion",),
    "tensor and zero": ("fourier",),
    "everything": ("neural ode",),
    "members": ("state space",),
    "members minor": ("branch",),
    "members and zero": ("autoregressive",),
}
"""Of each plan the networks of a default run, in which each network stands at least once."""


def chosen():
    """Return the pairs of network and plan of a default run."""
    return {(model, plan) for plan, models in DEFAULT.items() for model in models}
