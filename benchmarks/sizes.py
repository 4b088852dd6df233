"""What is measured at which size, in one place. Imports no framework: the peers read it too."""

import dataclasses
from typing import Any

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1e-4
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Mlp:
    """A perceptron with ReLU; `widths` from inputs to classes."""

    widths: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A decoder on sequences of `length` tokens."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int


@dataclasses.dataclass(frozen=True)
class Domains:
    """The network of `examples/domains.py`: coordinates of a block in, its rock domain out."""

    width: int


Network = Mlp | Transformer | Domains


def to_json(network: Network) -> dict[str, Any]:
    """For a worker's settings; `from_json` reads it back."""
    return {"kind": type(network).__name__, **dataclasses.asdict(network)}


def from_json(values: dict[str, Any]) -> Network:
    """The network that `to_json` wrote."""
    kinds: dict[str, type[Network]] = {kind.__name__: kind for kind in (Mlp, Transformer, Domains)}
    fields = {name: value for name, value in values.items() if name != "kind"}
    if "widths" in fields:
        fields["widths"] = tuple(fields["widths"])
    return kinds[values["kind"]](**fields)


@dataclasses.dataclass(frozen=True)
class StepCase:
    """A step to time: `units` steps per turn. More than 32 in flight block virtual CPU devices.

    With `members` as many networks train in one program, on one device alone.
    """

    name: str
    network: Network
    batch: int
    units: int
    repeats: int
    members: int | None = None


@dataclasses.dataclass(frozen=True)
class BatchSizeCase:
    """A search for the largest batch, within `memory` bytes per device."""

    name: str
    network: Network
    memory: int


@dataclasses.dataclass(frozen=True)
class MembersCase:
    """Populations of one network to train: all of `epochs` in a turn.

    **Fields:** `data`, a function of `benchmarks/populations.py`; `resampled`, each network on a
    bootstrap sample of its own; `repeats`, turns by number of networks; `torch_limit`, a loop over
    more networks in PyTorch is measured with `torch_sample` of them and scaled; `plan`, what
    plurax is told rather than left to choose, which takes compilations.
    """

    name: str
    data: str
    network: Mlp
    batch: int
    epochs: int
    resampled: bool
    repeats: dict[int, int]
    torch_limit: int = 256
    torch_sample: int = 20
    plan: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Limits:
    """A population beside what the machine can do, and while it is halved.

    **Fields:** `members` of the roofline; `matrix`, rows and columns of a large product; `triad`,
    elements of large arrays; `repeats` of both; `halving`, members left after each round, trained
    for `halving_steps`, in `halving_repeats` turns.
    """

    members: int
    matrix: int
    triad: int
    repeats: int
    halving: tuple[int, ...]
    halving_steps: int
    halving_repeats: int


SPLITS: dict[str, dict[str, Any]] = {
    "data=8": {"data": 8},
    "data=8, zero=1": {"data": 8, "zero": 1},
    "data=8, zero=3": {"data": 8, "zero": 3},
    "tensor=8": {"tensor": 8},
    "tensor=8, by token between layers": {"tensor": 8, "sequence": True},
    "data=2, tensor=4": {"data": 2, "tensor": 4},
}
"""The plans of `divided`: how one network is split. `sequence` is a matter of its shardings."""


@dataclasses.dataclass(frozen=True)
class Bytewise:
    """The transformer of `examples/language_model.py`, and its batch."""

    width: int
    depth: int
    heads: int
    window: int
    batch: int


@dataclasses.dataclass(frozen=True)
class DividedCase:
    """One network under each of `splits`, keys of `SPLITS`.

    **Fields:** `repeats`, turns with JAX by hand; `peer_repeats`, with other frameworks.
    """

    name: str
    network: Bytewise
    repeats: int
    peer_repeats: int
    splits: tuple[str, ...] = tuple(SPLITS)


PIPELINES: dict[str, dict[str, str]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "1f1b, remat=dots": {"schedule": "1f1b", "remat": "dots"},
    "1f1b, remat=full": {"schedule": "1f1b", "remat": "full"},
    "interleaved": {"schedule": "interleaved"},
    "zb-h1": {"schedule": "zb-h1"},
}
"""The plans of `pipelines` that split a network into stages alone."""
HYBRIDS: dict[str, dict[str, int]] = {
    "data=2, pipeline=2, tensor=2, zero=1": {"data": 2, "pipeline": 2, "tensor": 2, "zero": 1},
    "data=4, pipeline=2": {"data": 4, "pipeline": 2},
}
"""The plans of `pipelines` that split a network in several ways, on eight devices with 1F1B."""
BY_HAND: dict[str, dict[str, Any]] = {"one device": {}, "data=2": {"data": 2}} | {
    name: SPLITS[name] for name in ("data=8", "data=8, zero=1", "data=2, tensor=4")
}
"""Splits by hand, of which the fastest on this machine is what they are measured beside."""


@dataclasses.dataclass(frozen=True)
class PipelinesCase:
    """A network in stages on each of `devices`, under each of `plans`, keys of `PIPELINES`.

    **Fields:** `repeats`, turns of all plans with one device; `peer_repeats`, of the plans of one
    schedule with PyTorch; `hybrid`, a network under each of `hybrids` and `by_hand`, keys of
    `HYBRIDS` and `BY_HAND`; `compiled`, whose layers are set to each of `depths`, each compiled
    `compilations` times.
    """

    name: str
    network: Transformer
    batch: int
    microbatches: int
    devices: tuple[int, ...]
    plans: tuple[str, ...]
    repeats: int
    peer_repeats: int
    hybrid: Bytewise
    hybrid_repeats: int
    compiled: Transformer
    depths: tuple[int, ...]
    compilations: int
    hybrids: tuple[str, ...] = tuple(HYBRIDS)
    by_hand: tuple[str, ...] = tuple(BY_HAND)


COMPILED: dict[str, dict[str, Any]] = {
    "data=2": {"data": 2},
    "data=2, zero=1": {"data": 2, "zero": 1},
    "data=2, zero=3": {"data": 2, "zero": 3},
    "tensor=2": {"tensor": 2},
    "remat=dots": {"remat": "dots"},
    "remat=full": {"remat": "full"},
}
"""The plans of `compile`, each beside the same by hand."""
HOST_PLANS: dict[str, dict[str, Any]] = {
    "one device": {},
    "data=2, zero=1": {"data": 2, "zero": 1},
}
"""The plans of `compile` whose steps are timed on the host."""


@dataclasses.dataclass(frozen=True)
class CompilingCase:
    """A network of unrolled layers compiled under each of `plans`, keys of `COMPILED`.

    **Fields:** `repeats`, turns with JAX by hand; `leaves`, for each how many small arrays the
    parameters of a step are whose time on the host is taken, in `rounds`, under `host_plans`.
    """

    name: str
    network: Bytewise
    repeats: int
    leaves: tuple[int, ...]
    rounds: int
    plans: tuple[str, ...] = tuple(COMPILED)
    host_plans: tuple[str, ...] = tuple(HOST_PLANS)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What is measured on one GPU, within `minutes`.

    **Fields:** `rounds` of turns of about `turn` seconds for each row of `gpu_rows`; `members`,
    populations; `model`, fields of `gpt.Gpt`, as deep as is said to fit, at most `deepest`, in
    batches of `rows` with each of `remat`, in so many bytes of `memory`, None for the device's;
    `network`, in bfloat16 beside PyTorch; `quick`, the small rows, on any device.
    """

    rounds: int
    turn: float
    minutes: float
    members: tuple[MembersCase, ...]
    model: dict[str, int]
    rows: int
    remat: tuple[str, ...]
    deepest: int
    network: Bytewise
    memory: int | None = None
    quick: bool = False


@dataclasses.dataclass(frozen=True)
class SearchCase:
    """A GPT (fields of `gpt.Gpt`) to be trained in batches of `batch` on some nodes.

    `beside` is what is published of another search for it.
    """

    name: str
    model: dict[str, int]
    batch: int
    machine: str
    nodes: int
    beside: str = ""


@dataclasses.dataclass(frozen=True)
class PublishedCase:
    """A run of a GPT that is published, and is estimated.

    **Fields:** `seconds`, published for training on `examples` sequences; `plan`, the published
    one, with Megatron's rules where it has `tensor`, or None where it is searched;
    `within`, how near the estimate is wanted, None where it only stands beside.
    """

    name: str
    model: dict[str, int]
    batch: int
    machine: str
    nodes: int
    examples: float
    seconds: float
    plan: dict[str, Any] | None = None
    within: float | None = 0.15


@dataclasses.dataclass(frozen=True)
class BlockCase:
    """One block of a transformer, searched in `repeats` turns for `nodes` nodes of 8 devices.

    **Fields:** `mesh`, the sizes of the axes that autoparallel is given, batch first.
    """

    name: str
    width: int
    heads: int
    tokens: int
    batch: int
    mesh: tuple[int, ...]
    nodes: int
    repeats: int


@dataclasses.dataclass(frozen=True)
class PlansCase:
    """Plans of a network, or of `members`, whose steps are predicted, and measured in turns."""

    name: str
    network: Network
    batch: int
    plans: tuple[dict[str, Any], ...]
    repeats: int
    members: int | None = None


@dataclasses.dataclass(frozen=True)
class ServersCase:
    """A network trained by two workers and two servers, and as many bytes sent with no training.

    **Fields:** `packed`, steps in one call of TensorFlow's coordinator, of which its tutorial wants
    several; `ways`, how TensorFlow may lay the matrices on its servers, the fastest of which is
    measured; `updates` and `exchanges`, of all workers together in a turn of some seconds, many
    times `packed` times the workers: at the end of a turn a worker idles during a call. `servers`,
    `workers`, how many.
    """

    name: str
    network: Mlp
    batch: int
    packed: int
    updates: int
    exchanges: int
    repeats: int
    ways: tuple[str, ...] = ("whole", "concatenated", "by shards")
    servers: int = 2
    workers: int = 2


UNEVEN: dict[str, dict[str, Any] | None] = {
    "all-reduce": None,
    "sync": {"mode": "sync"},
    "sync, quorum 3": {"mode": "sync", "quorum": 3},
    "bounded 3": {"mode": "bounded", "staleness": 3},
    "async": {"mode": "async"},
}
"""How workers of which one is slow train: fields of `Servers`, or data parallelism."""


@dataclasses.dataclass(frozen=True)
class UnevenCase:
    """An example trained in some ways to the same held-out loss.

    The loss is not chosen: it is what one device reaches in `goal` epochs of batches of all workers
    together, with the same optimizer, rounded up to hundredths; `goal` is as large as a minute a
    way allows.

    **Fields:** `data`, the example; `batch`, of a worker's gradient, which takes `seconds`, on the
    slow worker `slow` times as long; `goal`; `epochs`, of every way, twice as many of
    `async`, whose epoch takes half the time; `ways`, keys of `UNEVEN`.
    """

    data: str
    batch: int
    goal: int
    epochs: int
    seconds: float = 0.05
    slow: int = 4
    servers: int = 2
    workers: int = 4
    ways: tuple[str, ...] = tuple(UNEVEN)


DEATHS: dict[str, tuple[str, str]] = {
    "a worker killed": ("worker 0", "SIGKILL"),
    "all workers killed": ("worker", "SIGKILL"),
    "a server killed": ("server 0", "SIGKILL"),
    "all servers killed": ("server", "SIGKILL"),
    "a worker stopped": ("worker 0", "SIGSTOP"),
    "a server stopped": ("server 0", "SIGSTOP"),
}
"""How the names of the processes begin that get a signal, and which."""
STOPPED = tuple(name for name, (_, number) in DEATHS.items() if number == "SIGSTOP")


@dataclasses.dataclass(frozen=True)
class RecoveryCase:
    """A network trained by workers and servers that are killed and stopped.

    **Fields:** `deaths`, keys of `DEATHS`, each with how often: of those stopped each waits for the
    `lease`, which is the default; `modes`, by name the fields of `Servers`; `batch`, of a worker's
    gradient; `examples`, random ones.
    """

    name: str
    network: Mlp
    batch: int
    deaths: dict[str, int]
    modes: dict[str, dict[str, Any]]
    examples: int = 1437
    lease: float = 30.0
    servers: int = 2
    workers: int = 2


def plans_to_compare() -> tuple[dict[str, Any], ...]:
    """Twelve plans for one device: more and less work, in larger and smaller parts.

    Virtual devices share the cores, so plans that differ in their devices are not among them.
    """
    return tuple(
        {"microbatches": count, "remat": remat}
        for count in (1, 4, 16, 64)
        for remat in ("none", "dots", "full")
    )


def chunks_to_compare() -> tuple[dict[str, Any], ...]:
    """Ten plans of a population on one device: chunks, and microbatches of their rows."""
    return tuple(
        {"chunk": chunk, "microbatches": count, "batch_dim": "major"}
        for chunk in (1, 2, 4, 16, 96)
        for count in (1, 4)
    )


@dataclasses.dataclass(frozen=True)
class ReliabilityCase:
    """A network of which copies are compared; `steps` between two comparisons that are timed."""

    name: str
    network: Mlp
    batch: int
    plans: dict[str, dict[str, int]]
    steps: int
    rounds: int


@dataclasses.dataclass(frozen=True)
class CallbacksCase:
    """A network trained by `fit`, `epochs` of `steps`, with callbacks and without."""

    name: str
    network: Mlp
    batch: int
    steps: int
    epochs: int
    repeats: int


@dataclasses.dataclass(frozen=True)
class SourcesCase:
    """A perceptron over a table of `rows`, read from each of `sources` (`workers/jax_sources.py`).

    **Fields:** `epochs` of a turn; `repeats`, turns.
    """

    name: str
    network: Mlp
    rows: int
    batch: int
    epochs: int
    repeats: int
    sources: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class HostsCase:
    """A transformer trained by several processes under each of `splits`, keys of `SPLITS`.

    **Fields:** `repeats`, turns; `kills` of one of two processes that train `restarted`.
    """

    name: str
    network: Bytewise
    repeats: int
    kills: int
    splits: tuple[str, ...] = ("data=8", "data=8, zero=3")
    processes: int = 2
    restarted: Mlp = Mlp((64, 256, 256, 10))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Everything that `--quick` makes smaller."""

    step: tuple[StepCase, ...]
    accumulation: StepCase
    domains: Domains
    domains_batch: int
    domains_steps: int
    """Steps per epoch."""
    domains_repeats: int
    inference_chunk: int
    inference_rows: int
    inference_repeats: int
    inference_all_rows: int
    """Once, after the repeats on fewer rows."""
    batch_size: tuple[BatchSizeCase, ...]
    members: tuple[MembersCase, ...]
    limits: Limits
    """Of the first case of `members`."""
    divided: tuple[DividedCase, ...]
    gpu: Gpu
    pipelines: PipelinesCase
    compiling: CompilingCase
    searches: tuple[SearchCase, ...]
    published: tuple[PublishedCase, ...]
    blocks: tuple[BlockCase, ...]
    plans: tuple[PlansCase, ...]
    servers: tuple[ServersCase, ...]
    uneven: tuple[UnevenCase, ...]
    recovery: tuple[RecoveryCase, ...]
    reliability: tuple[ReliabilityCase, ...]
    callbacks: tuple[CallbacksCase, ...]
    hosts: HostsCase
    sources: tuple[SourcesCase, ...]


_MLP = Mlp((8, 1800, 1800, 1800, 16))
_SMALL_MLP = Mlp((8, 256, 256, 16))
_SMALLEST = Mlp((8, 32, 64, 4))
_SPIRALS = Mlp((2, 32, 2))
_DIGITS = Mlp((64, 128, 10))
_TEN_MILLION = Mlp((784, 2048, 2048, 2048, 10))
_SOURCES = (
    "NumPy arrays", "a dict of lists", "a pandas DataFrame", "a polars DataFrame",
    "an Arrow table", "mapped .npy files", "an .npz file", "a Parquet file in windows",
    "an Arrow file in windows", "a Grain dataset", "a PyTorch TensorDataset", "a PyTorch Dataset",
    "a PyTorch DataLoader", "a Hugging Face Dataset", "a Hugging Face IterableDataset",
    "a tf.data.Dataset",
)  # fmt: skip
_SMALL_STEPS = ("NumPy arrays", "a PyTorch DataLoader")
_COPIES = {"data=2": {"data": 2}, "data=4": {"data": 4}, "data=4, zero=1": {"data": 4, "zero": 1}}
_TRANSFORMER = Transformer(layers=4, width=256, heads=4, vocabulary=256, length=64)
"""Megatron's rules for the transformer."""
_GPT3 = {"depth": 96, "width": 12288, "heads": 96}
_MT_NLG = {"depth": 105, "width": 20480, "heads": 128}
_MT_NLG_BATCH = PublishedCase(
    "MT-NLG, 530B, a batch",
    _MT_NLG,
    1920,
    "8xA100-80GB",
    280,
    examples=1920,
    seconds=60.1,
    within=None,
)
_DAY, _YEAR = 86_400, 31_557_600
_DEEP_TRANSFORMER = dataclasses.replace(_TRANSFORMER, layers=16, width=128)

_SPIRALS_CASE = MembersCase(
    "spirals",
    "spirals",
    _SPIRALS,
    batch=100,
    epochs=100,
    resampled=False,
    repeats={1: 31, 10: 31, 100: 11, 1000: 7},
)

FULL = Sizes(
    step=(
        StepCase("MLP, 6.5M parameters, batch 1024", _MLP, 1024, units=1, repeats=31),
        StepCase("MLP, 0.07M parameters, batch 1024", _SMALL_MLP, 1024, units=20, repeats=31),
        StepCase("transformer, 3.2M parameters, batch 16 × 64", _TRANSFORMER, 16, 1, repeats=31),
        StepCase("8 MLPs, 2,700 parameters each, batch 64", _SMALLEST, 64, 20, 31, members=8),
    ),
    accumulation=StepCase("transformer, 128 × 64", _TRANSFORMER, 128, units=1, repeats=7),
    domains=Domains(width=1792),
    domains_batch=1024,
    domains_steps=12,
    domains_repeats=9,
    inference_chunk=2048,
    inference_rows=50_000,
    inference_repeats=7,
    inference_all_rows=1_000_000,
    batch_size=(
        BatchSizeCase("MLP, 6.5M parameters", _MLP, 1024 * MIB),
        BatchSizeCase("transformer, 3.2M parameters", _TRANSFORMER, 1024 * MIB),
    ),
    members=(
        _SPIRALS_CASE,
        MembersCase(
            "digits, bootstrap",
            "digits",
            _DIGITS,
            batch=128,
            epochs=3,
            resampled=True,
            repeats={1: 31, 32: 15, 256: 7},
        ),
    ),
    limits=Limits(
        members=100,
        matrix=2048,
        triad=2**25,
        repeats=15,
        halving=(1000, 250, 62),
        halving_steps=20,
        halving_repeats=15,
    ),
    divided=(
        DividedCase("0.9M parameters", Bytewise(128, 4, 8, 128, batch=16), 21, 5),
        DividedCase("4.9M parameters", Bytewise(256, 6, 8, 128, batch=16), 11, 3),
    ),
    gpu=Gpu(
        rounds=7,
        turn=0.1,
        minutes=6.5,
        members=(dataclasses.replace(_SPIRALS_CASE, repeats={10: 9, 100: 9, 1000: 7}),),
        model={"depth": 1, "width": 1024, "heads": 16, "vocabulary": 50304, "tokens": 1024},
        rows=8,
        remat=("none", "dots", "full", "offload"),
        deepest=1024,
        network=Bytewise(1024, 12, 16, 512, batch=32),
    ),
    pipelines=PipelinesCase(
        "transformer, 16 layers, 3.2M parameters",
        _DEEP_TRANSFORMER,
        batch=16,
        microbatches=8,
        devices=(4, 8),
        plans=tuple(PIPELINES),
        repeats=5,
        peer_repeats=3,
        hybrid=Bytewise(128, 4, 8, 64, batch=32),
        hybrid_repeats=5,
        compiled=Transformer(layers=4, width=64, heads=4, vocabulary=256, length=32),
        depths=(4, 12, 24, 48),
        compilations=3,
    ),
    compiling=CompilingCase(
        "12 unrolled layers",
        Bytewise(32, 12, 4, 16, batch=8),
        repeats=3,
        leaves=(3, 300),
        rounds=200,
    ),
    searches=(
        SearchCase(
            "GPT, 1.7B",
            {"depth": 24, "width": 2304, "heads": 24},
            batch=512,
            machine="8xA100-80GB",
            nodes=4,
        ),
        SearchCase(
            "GPT, 39B",
            {"depth": 48, "width": 8192, "heads": 64},
            batch=1536,
            machine="8xA100-80GB",
            nodes=8,
            # Zheng et al. 2022, https://arxiv.org/abs/2201.12023, table 5.
            beside="Alpa on 64 V100: 2,393 s",
        ),
        SearchCase(
            "GPT-3, 175B",
            _GPT3,
            batch=1536,
            machine="8xA100-80GB",
            nodes=128,
        ),
    ),
    # GPT-3 on 300 billion tokens. V100, scaled from 288 years on one of them, and 34 days on A100:
    # Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, sections 1 and 5.1.
    # The last two are kept aside as a check: Smith et al. 2022, https://arxiv.org/abs/2201.11990,
    # section 2.4, a batch on 280 servers.
    published=(
        PublishedCase("GPT-3, 175B", _GPT3, 1536, "8xV100-32GB", 1, 300e9 / 2048, 36 * _YEAR),
        PublishedCase("GPT-3, 175B", _GPT3, 1536, "8xV100-32GB", 64, 300e9 / 2048, 7 / 12 * _YEAR),
        PublishedCase("GPT-3, 175B", _GPT3, 1536, "8xA100-80GB", 128, 300e9 / 2048, 34 * _DAY),
        _MT_NLG_BATCH,
        dataclasses.replace(
            _MT_NLG_BATCH,
            name=f"{_MT_NLG_BATCH.name} under the published plan",
            plan={
                "data": 8,
                "tensor": 8,
                "pipeline": 35,
                "microbatches": 240,
                "schedule": "1f1b",
                "remat": "full",
                "precision": "bfloat16",
            },
        ),
    ),
    blocks=(
        BlockCase("8 devices", 1024, 16, 256, 64, mesh=(8,), nodes=1, repeats=3),
        BlockCase("8 × 8 devices", 1024, 16, 256, 64, mesh=(8, 8), nodes=8, repeats=3),
    ),
    plans=(
        PlansCase(
            "the transformer, 3.2M parameters",
            _TRANSFORMER,
            64,
            plans_to_compare(),
            repeats=7,
        ),
        PlansCase(
            "a perceptron",
            Mlp((784, 1024, 1024, 1024, 10)),
            512,
            plans_to_compare(),
            repeats=9,
        ),
        PlansCase(
            "96 small perceptrons",
            Mlp((64, 32, 32, 10)),
            64,
            chunks_to_compare(),
            repeats=15,
            members=96,
        ),
    ),
    servers=(
        ServersCase(
            "1M parameters",
            Mlp((64, 688, 688, 688, 10)),
            batch=32,
            packed=10,
            updates=400,
            exchanges=400,
            repeats=3,
        ),
        ServersCase(
            "10M parameters",
            Mlp((64, 2216, 2216, 2216, 10)),
            batch=32,
            packed=2,
            updates=64,
            exchanges=64,
            repeats=3,
        ),
    ),
    uneven=(
        UnevenCase("digits", batch=32, goal=6, epochs=9),
        UnevenCase("domains", batch=256, goal=5, epochs=8),
    ),
    recovery=(
        RecoveryCase(
            "digits",
            _DIGITS,
            batch=32,
            deaths={name: 1 if name in STOPPED else 3 for name in DEATHS},
            modes={"sync": {"mode": "sync"}, "bounded 3": {"mode": "bounded", "staleness": 3}},
        ),
    ),
    reliability=(
        ReliabilityCase("digits", _DIGITS, 64, _COPIES, steps=500, rounds=15),
        ReliabilityCase("MLP, 10M parameters, batch 1,024", _TEN_MILLION, 1024, _COPIES, 2, 9),
    ),
    callbacks=(
        CallbacksCase("digits", _DIGITS, 64, steps=200, epochs=40, repeats=15),
        CallbacksCase("MLP, 10M parameters, batch 256", _TEN_MILLION, 256, 10, 3, repeats=7),
    ),
    hosts=HostsCase("4.9M parameters", Bytewise(256, 6, 8, 128, batch=16), repeats=7, kills=3),
    sources=(
        SourcesCase("batch 1,024", Mlp((16, 256, 256, 1)), 100_000, 1024, 2, 5, _SOURCES),
        SourcesCase(
            "batch 256, a step of 0.3 ms", Mlp((16, 128, 128, 1)), 100_000, 256, 2, 5, _SMALL_STEPS
        ),
    ),
)

_TINY = Transformer(layers=2, width=32, heads=2, vocabulary=32, length=8)
_TINY_GPT = {"depth": 2, "width": 64, "heads": 4, "vocabulary": 128, "tokens": 32}

QUICK = Sizes(
    step=(
        StepCase("MLP, tiny, batch 64", Mlp((8, 32, 16)), 64, units=5, repeats=3),
        StepCase("transformer, tiny, batch 8 × 8", _TINY, 8, units=2, repeats=3),
        StepCase("3 MLPs, tiny, batch 64", Mlp((8, 32, 16)), 64, units=5, repeats=3, members=3),
    ),
    accumulation=StepCase("transformer, tiny, 128 × 8", _TINY, 128, units=1, repeats=3),
    domains=Domains(width=32),
    domains_batch=64,
    domains_steps=3,
    domains_repeats=3,
    inference_chunk=512,
    inference_rows=2_000,
    inference_repeats=3,
    inference_all_rows=5_000,
    batch_size=(BatchSizeCase("MLP, tiny", Mlp((8, 32, 16)), 1 * MIB),),
    members=(
        MembersCase(
            "spirals",
            "spirals",
            _SPIRALS,
            batch=100,
            epochs=10,
            resampled=False,
            repeats={1: 3, 10: 3},
            torch_limit=5,
            torch_sample=2,
            plan={"chunk": 5, "batch_dim": "minor"},
        ),
        MembersCase(
            "digits, bootstrap",
            "digits",
            _DIGITS,
            batch=128,
            epochs=1,
            resampled=True,
            repeats={2: 3},
            plan={"chunk": 1, "batch_dim": "minor"},
        ),
    ),
    limits=Limits(
        members=10,
        matrix=512,
        triad=2**20,
        repeats=3,
        halving=(10, 2),
        halving_steps=5,
        halving_repeats=3,
    ),
    divided=(
        DividedCase(
            "tiny",
            Bytewise(32, 2, 8, 16, batch=8),
            repeats=3,
            peer_repeats=2,
            splits=("data=8, zero=3", "tensor=8, by token between layers"),
        ),
    ),
    gpu=Gpu(
        rounds=2,
        turn=0.01,
        minutes=5,
        members=(
            MembersCase(
                "spirals", "spirals", Mlp((2, 8, 2)), 50, 2, resampled=False, repeats={3: 2}
            ),
        ),
        model={"depth": 1, "width": 32, "heads": 2, "vocabulary": 64, "tokens": 32},
        rows=4,
        remat=("none",),
        deepest=8,
        network=Bytewise(64, 2, 4, 32, batch=8),
        memory=2**20,
        quick=True,
    ),
    pipelines=PipelinesCase(
        "transformer, tiny",
        dataclasses.replace(_TINY, layers=4),
        batch=8,
        microbatches=4,
        devices=(4,),
        plans=("1f1b",),
        repeats=3,
        peer_repeats=2,
        hybrid=Bytewise(32, 2, 8, 16, batch=16),
        hybrid_repeats=3,
        compiled=_TINY,
        depths=(4, 8),
        compilations=1,
        hybrids=("data=4, pipeline=2",),
        by_hand=("data=2", "data=8"),
    ),
    compiling=CompilingCase(
        "2 unrolled layers",
        Bytewise(32, 2, 4, 8, batch=4),
        repeats=1,
        leaves=(3,),
        rounds=5,
        plans=("data=2, zero=1",),
        host_plans=("data=2, zero=1",),
    ),
    searches=(
        SearchCase(
            "GPT, tiny",
            _TINY_GPT,
            batch=16,
            machine="2xA100-80GB",
            nodes=1,
        ),
    ),
    published=(
        PublishedCase("GPT, tiny", _TINY_GPT, 16, "2xA100-80GB", 1, examples=1600, seconds=1.0),
        PublishedCase(
            "GPT, too large", _TINY_GPT | {"width": 98304}, 16, "2xA100-80GB", 1, 1600, 1.0
        ),
        PublishedCase(
            "GPT, tiny, a plan",
            _TINY_GPT,
            16,
            "2xA100-80GB",
            1,
            examples=1600,
            seconds=1.0,
            plan={"tensor": 2, "precision": "bfloat16"},
            within=None,
        ),
    ),
    blocks=(BlockCase("2 devices", 32, 2, 8, 4, mesh=(2,), nodes=1, repeats=1),),
    plans=(PlansCase("the transformer, tiny", _TINY, 8, ({}, {"microbatches": 2}), repeats=1),),
    servers=(
        ServersCase(
            "tiny",
            Mlp((8, 300, 300, 4)),
            batch=8,
            packed=2,
            updates=8,
            exchanges=8,
            repeats=2,
            ways=("by shards",),
        ),
    ),
    uneven=(
        UnevenCase("digits", 128, goal=1, epochs=2, seconds=0.01, ways=("all-reduce", "async")),
    ),
    recovery=(
        RecoveryCase(
            "digits",
            _DIGITS,
            batch=32,
            deaths={"a worker killed": 1},
            modes={"bounded 3": {"mode": "bounded", "staleness": 3}},
        ),
    ),
    reliability=(ReliabilityCase("digits", _DIGITS, 64, {"data=2": {"data": 2}}, 20, rounds=3),),
    callbacks=(CallbacksCase("digits", _DIGITS, 64, steps=20, epochs=2, repeats=3),),
    hosts=HostsCase(
        "tiny", Bytewise(32, 2, 8, 16, batch=8), repeats=2, kills=1, splits=("data=8, zero=3",)
    ),
    sources=(
        SourcesCase(
            "tiny", Mlp((4, 8, 1)), 200, 32, 2, 2,
            ("NumPy arrays", "a pandas DataFrame", "a Parquet file in windows", _SOURCES[-1]),
        ),
    ),
)  # fmt: skip
