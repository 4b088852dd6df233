"""The plans every network of the zoo is trained under, and which of them a default run takes."""

PLANS = {
    "data": {"data": 3, "microbatches": 2},
    "uneven": {"data": 3, "microbatches": (1, 2, 1)},
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
    "uneven and tensor": {"data": 2, "tensor": 2, "zero": 1, "microbatches": (3, 1)},
    "everything": {"data": 2, "tensor": 2, "zero": 2, "microbatches": 2, "remat": "full"},
    "members": {"member": 2, "chunk": 1, "batch_dim": "major"},
    "members minor": {"chunk": 2, "batch_dim": "minor"},
    "members and zero": {"member": 2, "data": 2, "zero": 1, "chunk": 1},
}
"""Name: the fields of the plan; rules are the model's."""


DEFAULT = {
    "data": ("spiking", "contrastive"),
    "uneven": ("diffusion", "graph"),
    "zero 1": ("recommender", "batch norm"),
    "zero 2": ("pinn", "unet"),
    "zero 3": ("neural ode", "gru"),
    "tensor": ("equilibrium", "vision transformer"),
    "dots": ("branch", "bilstm"),
    "full": ("graph", "experts"),
    "pipeline": ("autoregressive", "implicit"),
    "pipeline and zero": ("spiking", "contrastive"),
    "pipeline and tensor": ("fourier", "diffusion"),
    "tensor and zero": ("implicit", "fourier"),
    "uneven and tensor": ("vision transformer", "experts"),
    "everything": ("neural ode", "diffusion"),
    "members": ("equilibrium", "state space"),
    "members minor": ("branch", "neural ode"),
    "members and zero": ("autoregressive", "graph"),
}
"""Of each plan the networks of a default run: networks that take long to trace stand once."""


def chosen():
    """Return the pairs of network and plan of a default run."""
    return {(model, plan) for plan, models in DEFAULT.items() for model in models}
