"""Answer the names that other libraries have for arguments of `fit`."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from plurax import errors

P = ParamSpec("P")
T = TypeVar("T")

WRITE = {
    "epochs=": "max_epochs num_epochs n_epochs nb_epoch num_train_epochs",
    "data=": "x train_data train_dataset train_dataloaders train_loader datamodule dataset",
    "evaluation=": "validation_data val_data eval_data eval_dataset val_dataloaders val_loader",
    "batch_size=": "batch per_device_train_batch_size global_batch_size",
    "seed=": "random_state random_seed rng key",
    "output=": "default_root_dir log_dir logdir workdir save_dir output_dir checkpoint_dir",
    "resume=True": "ckpt_path resume_from_checkpoint",
    "evaluate_every=, in steps": "val_check_interval eval_steps eval_every",
    "report_every=, in epochs": "check_val_every_n_epoch validation_freq eval_epochs",
    "checkpoint_every=, in steps": "save_steps save_every every_n_train_steps",
    "max_steps=": "num_steps total_steps train_steps steps_per_epoch limit_train_batches",
    "max_seconds=": "max_time",
    "progress=": "verbose enable_progress_bar",
    'ragged="drop"': "drop_last drop_remainder",
    "devices=": "accelerator gpus device",
    "plan=px.Plan(data=..., zero=..., ...)": "strategy mesh sharding",
    "plan=px.Plan(microbatches=...)": "accumulate_grad_batches gradient_accumulation_steps",
    'plan=px.Plan(precision="bfloat16")': "precision mixed_precision bf16 fp16",
    "callbacks=": "callback logger loggers",
    "task=": "model module state params",
    "optax.adam(...) for the optimizer": "lr learning_rate optimizers",
    "optax.chain(optax.clip_by_global_norm(...), ...) for the optimizer": """
        gradient_clip_val clip_norm max_grad_norm""",
    "px.Task(init=..., loss=...) for the task": "loss loss_fn criterion metrics",
}
"""What to write here: the names that Lightning, Keras, Hugging Face and others have for it."""


def answers_other_names(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that says of an argument it does not have what to write instead."""

    @functools.wraps(function)
    def answering(*args: P.args, **kwargs: P.kwargs) -> T:
        check_names(function, function.__name__, kwargs)
        return function(*args, **kwargs)

    return answering


def check_names(function: Callable[..., Any], shown: str, names: Iterable[str]) -> None:
    """Raise `TaskError` for a name that is no argument of a function, shown as `shown`."""
    known = list(inspect.signature(function).parameters)
    for name in names:
        if name not in known:
            write = next((here for here, others in WRITE.items() if name in others.split()), None)
            raise errors.argument_unknown(shown, name, write, known)
