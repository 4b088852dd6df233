"""The table of mistakes: what a user writes, and what plurax says. Tested, and shown in the docs.

`python -m tests.mistakes` prints the page `docs/mistakes.md`.
"""

# What is written in Python, the kind of error, and words of its message. `task`, `optimizer`,
# `data` (32 rows `x` and `y`), `module`s of three libraries and `loss` are in test_mistakes.py.
PYTHON = {
    "What is trained": [
        ("px.fit(linen_module, optimizer, data, batch_size=8)", "TaskError",
         "the task is a Dense, and what is trained is a plurax.Task. plurax.adapters.linen.task("),
        ("px.fit(nnx_module, optimizer, data, batch_size=8)", "TaskError",
         "the task is a Linear, and what is trained is a plurax.Task. plurax.adapters.nnx.task("),
        ("px.fit(equinox_module, optimizer, data, batch_size=8)", "TaskError",
         "the task is a Linear, and what is trained is a plurax.Task. plurax.adapters.equinox."),
        ("px.fit(transformed, optimizer, data, batch_size=8)", "TaskError",
         "the task is a Transformed, and what is trained is a plurax.Task. plurax.adapters.haiku."),
        ("px.fit(loss, optimizer, data, batch_size=8)", "TaskError",
         "the task is a function, and what is trained is a plurax.Task. A function of "
         "hyperparameters, hyper -> Task, needs members="),
        ("px.compile(linen_module, optimizer, px.Plan(), data)", "TaskError",
         "plurax.adapters.linen.task(module, init=..., loss=...) makes a task of it."),
        ("px.Task(init=init, loss=lambda params, batch: batch['y'])", "TaskError",
         "takes (params, batch), and is called with (params, batch, keys): write "
         "def loss(params, batch, keys)"),
        ("px.compile(px.Task(init=init, loss=lambda params, batch, keys: "
         "jax.lax.pmean(batch['y'], 'batch')), optimizer, px.Plan(), data).evaluate(None, data)",
         "TaskError", "communicates over an axis 'batch', as functions for jax.pmap do."),
        ("px.Task(init=init, loss=loss, predict=lambda x: x)", "TaskError",
         "takes (x), and is called with (params, inputs)"),
        ("px.Task(init=init(key), loss=loss)", "TaskError",
         "Task.init is a dict, and must be a function of (key)."),
        ("px.per_example(lambda params, example: 0.0)", "TaskError",
         "takes (params, example), and is called with (params, example, key)"),
        ("px.adapters.linen.task(linen_module, lambda key: {}, lambda apply, batch: 0)",
         "TaskError", "is called with (apply, batch, keys): write def loss(apply, batch, keys)"),
        ("px.adapters.linen.task(nn.Dense, lambda key: {}, flax_loss)", "TaskError",
         "linen.task(module=...) got a Dense; give an instance of the module: MyModule(...)."),
        ("px.adapters.nnx.task(build=nnx_module, loss=flax_loss)", "TaskError",
         "nnx.task(build=...) got a Linear instance; a task builds its own from each "
         "seed: build=lambda rngs: Linear(..., rngs=rngs)."),
        ("px.adapters.nnx.task(build=lambda rngs: nnx_module, loss=lambda model, batch: 0)",
         "TaskError", "takes (model, batch), and is called with (model, batch, keys)"),
        ("px.adapters.equinox.task(build=equinox_module, loss=flax_loss)", "TaskError",
         "equinox.task(build=...) got a Linear instance"),
        ("px.adapters.haiku.task(lambda x: x, lambda key: {}, flax_loss)", "TaskError",
         "haiku.task(transformed=...) got a function; give a pair of pure functions: "),
    ],
    "The optimizer": [
        ("px.fit(task, 'adam', data, batch_size=8)", "TaskError",
         "the optimizer is 'adam', and must be a transformation of optax; write "
         "optimizer=optax.adam(learning_rate)."),
        ("px.fit(task, optax.adam, data, batch_size=8)", "TaskError",
         "and must be a transformation of optax; call it: optax.adam(learning_rate)."),
        ("px.fit(task, 1e-3, data, batch_size=8)", "TaskError",
         "the optimizer is 0.001, and must be a transformation of optax; write optimizer="),
        ("px.fit(task, lambda hyper: optimizer, data, batch_size=8)", "TaskError",
         "a function of hyperparameters needs members=plurax.Members(...)."),
        ("px.compile(task, None, px.Plan(), data)", "TaskError",
         "the optimizer is a NoneType, and must be a transformation of optax"),
    ],
    "The plan and the members": [
        ("px.fit(task, optimizer, data, batch_size=8, plan={'data': 2})", "PlanError",
         "the plan is a dict, and must be a plurax.Plan. Write plan=plurax.Plan(data=4)"),
        ("px.Plan(pipeline=2, layers=(4, 0))", "PlanError",
         "give the number of layers of each stage, at least 1, in the order of the stages"),
        ("px.Plan(pipeline=2, layers=(1, 2, 1))", "PlanError",
         "has 3 numbers of layers, and the plan has 2 stages (`pipeline`, or `stages`): give one"),
        ("px.fit(task, optimizer, data, batch_size=8, plan='plan.toml')", "PlanError",
         "must be a plurax.Plan. plurax.Plan.load('plan.toml') reads one from a file."),
        ("px.fit(task, optimizer, data, batch_size=8, members=5)", "MembersError",
         "the members are a int; write members=plurax.Members(5)."),
        ("px.Plan(data=0)", "PlanError", "data must be a whole number of at least 1"),
        ("px.Plan(zero=3.0)", "PlanError", "zero must be one of 0, 1, 2, 3."),
        ("px.Plan(schedule='gpip')", "PlanError", "Did you mean 'gpipe'?"),
        ("px.Members(0)", "MembersError", "a population needs at least one member"),
        ("px.Members(-3)", "MembersError", "Members(seeds=-3): give a number of members"),
        ("px.Members(2.5)", "MembersError", "Members(seeds=2.5): give a number of members"),
        ("px.Members('abc')", "MembersError", "Members(seeds='abc'): give a number of members"),
        ("px.ensemble.kfold(0)", "MembersError", "at least 2 folds are needed to leave one out."),
        ("px.ensemble.kfold(2.5)", "MembersError", "at least 2 folds are needed to leave one out."),
        ("px.ensemble.kfold(3, seed='a')", "TaskError", "seed='a': give a whole number from 0"),
        *(
            (f"px.ensemble.subsample({sizes})", "MembersError",
             "give sizes above 0: whole numbers of rows, or fractions below 1.")
            for sizes in ("'0.5'", "1.0", "[10, 2.5]", "float('nan')", "None")
        ),
        ("px.Members(3, hyper=[0.1, 0.2, 0.3])", "MembersError",
         "give hyperparameters by name, {'learning_rate': [0.1, 0.2, 0.3]}"),
        ("px.Members(3, {'rate': '0.1'}).hyper_table()", "MembersError",
         "the hyperparameter 'rate' is '0.1'; inside one program it must be a number"),
        ("px.ensemble.uniform('0', '1')", "MembersError",
         "plurax.ensemble.uniform('0', '1'): needs finite numbers, low < high."),
        ("px.ensemble.log_uniform(1, float('inf'))", "MembersError",
         "needs finite numbers, 0 < low"),
        ("px.Members(3).take([0.5])", "MembersError", "there is no member 0.5"),
        ("px.ensemble.tune(task, optimizer, data, members=None, batch_size=8)", "MembersError",
         "the members are a NoneType; write members=plurax.Members(10)."),
        ("px.ensemble.tune(task, 'adam', data, members=px.Members(2), batch_size=8)", "TaskError",
         "write optimizer=optax.adam(learning_rate)."),
        ("px.verify(task, optimizer, {'data': 2}, data)", "PlanError",
         "the plan is a dict, and must be a plurax.Plan."),
        ("px.verify(loss, optimizer, px.Plan(data=2), data)", "TaskError",
         "the task is a function, and what is trained is a plurax.Task."),
        ("px.virtual_devices(0)", "PlanError", "0 virtual devices: give a whole number"),
        ("px.Plan(bucket_bytes=25e6)", "PlanError", "bucket_bytes must be a whole number of at"),
        ("px.Plan(reduce_dtype='fp8')", "PlanError",
         "reduce_dtype must be one of 'bfloat16', or left out."),
        ("px.fit(task, optimizer, data, batch_size=8, plan=px.Plan(reduce_dtype='bfloat16'), "
         "servers=px.Servers(shards=1, workers=2))", "PlanError",
         "what workers push is rounded by Servers(compression='bfloat16'). Say that instead"),
    ],
    "Metrics and weights": [
        ("px.Task(init=init, loss=loss, metrics=lambda batch: {})", "TaskError",
         "takes (batch), and is called with (params, batch)"),
        ("px.fit(other(metrics=lambda p, b: {'a': b['y']}), optimizer, data, batch_size=8, "
         "evaluation=data)", "TaskError", "metric 'a': it is a"),
        ("px.freeze(loss, 'w')", "TaskError", "plurax.freeze got a function for its task"),
        ("px.freeze(task, ['w'])", "TaskError", "frozen=(['w'],): give patterns of paths"),
        ("px.fit(px.freeze(task, 'x'), optimizer, data, batch_size=8)", "TaskError",
         "frozen='x' matches no parameter; their paths are w."),
        ("px.fit(px.freeze(task, 'w'), optimizer, data, batch_size=8)", "TaskError",
         "freeze every parameter, and none is left to train."),
        ("px.start_from(task, 'none.safetensors')", "CheckpointError",
         "none.safetensors: there are no weights; no such file or folder."),
        ("px.start_from(task, {'w': np.zeros(4)})", "CheckpointError",
         "w: the parameter has shape (3,), the weight (4,)"),
        ("px.start_from(make_task, {})", "TaskError", "lambda hyper: plurax.start_from(make_task"),
        ("px.weights.save({}, 'a.bin')", "CheckpointError", "file; name it so."),
    ],
    "Machines": [
        ("px.Machine.preset('8xH100')", "MachineError", "Did you mean '8xH100-80GB'?"),
        ("px.Machine.preset('16xA100-80GB')", "MachineError",
         "a node holds 1 to 8 A100-80GB; more come as nodes: "
         "plurax.Machine.preset('8xA100-80GB', nodes=2)."),
        ("px.Machine('mine', {'float32': '20 Tflop/s'}, 24e9, 1e12)", "MachineError",
         "flops['float32']='20 Tflop/s', and must be a finite number above 0"),
        ("px.Machine('mine', {'fp16': 7e13}, 24e9, 1e12)", "MachineError",
         "flops has a rate for 'fp16', which is none of the dtypes float64, float32, bfloat16"),
        ("px.Machine.load('none.toml')", "MachineError", "none.toml is not a machine in TOML"),
        *(
            (f"px.{call}", "MachineError",
             "machine='8xA100-80GB', and must be a plurax.Machine: plurax.Machine.preset(")
            for call in (
                "fit(task, optimizer, data, batch_size=8, machine='8xA100-80GB')",
                "estimate(task, optimizer, px.Plan(), data, '8xA100-80GB')",
            )
        ),
    ],
    "Sweeps and halving": [
        ("px.ensemble.successive_halving(task, optimizer, data, members=3, batch_size=8, epochs=9)",
         "MembersError", "the members are a int; write members=plurax.Members(3)."),
        ("px.ensemble.successive_halving(task, optimizer, data, members=px.Members(3), "
         "batch_size=8, epochs='9')", "MembersError",
         "epochs='9', reduction=3): needs 1 <= min_epochs <= epochs"),
        ("px.ensemble.successive_halving(task, optimizer, data, members=px.Members(3), "
         "batch_size=8, epochs=9, slots=0)", "MembersError",
         "slots=0): give how many members train at a time"),
        ("px.ensemble.successive_halving(task, optimizer, data, members=px.Members(3), "
         "batch_size=8, epochs=9, evaluation={'x': data['x']})", "BatchError",
         "does not fit the program"),
        ("px.ensemble.successive_halving(task, optimizer, data, members=px.Members(3), "
         "batch_size=8.0, epochs=9)", "BatchError",
         "batch_size=8.0: give the number of examples of a step"),
        *(
            (f"px.sweep(make_task, optimizer, data, members=px.Members(2), batch_size=8, "
             f"shapes={shapes})", "MembersError", "a list of at least one dict of settings")
            for shapes in ("{'width': [1, 2]}", "[]", "[1, 2]")
        ),
        ("px.sweep(task, optimizer, data, members=px.Members(2), batch_size=8, "
         "shapes=px.ensemble.grid(width=[1, 2]))", "MembersError",
         "Give a function that builds it: def task(width): return plurax.Task(...)."),
        ("px.sweep(make_task, optimizer, data, members=px.Members(2), batch_size=8, "
         "shapes=[{'widht': 4}])", "MembersError",
         "the shapes of the sweep call task(widht), and its function takes (width"),
    ],
    "Arguments of other kinds": [
        ("px.fit(task, optimizer, data, batch_size=8, output=-1)", "ArgumentError",
         "plurax.fit(output=-1): output has to be a path, of names of at most 255 bytes or None."),
        ("px.fit(task, optimizer, data, batch_size=8, output='a' * 256)", "CheckpointError",
         "is no path: each name in it has at most 255 bytes, none of them NUL."),
        ("px.fit(task, optimizer, data, batch_size=8, evaluation=-1)", "BatchError",
         "evaluation of type int are not supported; give arrays in a tree"),
        ("px.fit(task, optimizer, data, batch_size=8, devices='x')", "ArgumentError",
         "plurax.fit(devices='x'): devices has to be a sequence, each a Device or None."),
        ("px.compile(task, optimizer, px.Plan(), data, compiler_options={'xla_nope': 1})",
         "ArgumentError", "compiler_options={'xla_nope': 1}: XLA's compiler for cpu has no such "
         "option. A name is that of a flag of XLA without its dashes"),
        ("px.Plan(data=10**5000)", "ArgumentError",
         "plurax.Plan(data=a whole number of 5001 digits): data has to be a whole number."),
        ("px.Members(3).arrays(rows=-1)", "ArgumentError", "plurax.Members.arrays(rows=-1): rows"),
        ("px.search(task, optimizer, data, machine, count=0)", "ArgumentError",
         "plurax.search(count=0): count has to be a whole number from 1"),
        ("px.search(task, optimizer, data, machine, memory='40 pounds')", "ArgumentError",
         "memory='40 pounds' is no number of bytes above 0: write 40GB, 512MB or 4e10"),
        ("px.search(task, optimizer, data, machine, pinned={'dta': 2})", "PlanError",
         "pinned: 'dta' is not a field of a plan. Did you mean 'data'?"),
        ("px.search(task, optimizer, data, machine, pinned=px.Plan(tensor=2, "
         "shardings={'v': ('tensor',)}))", "PlanError",
         "the sharding rule 'v' matches no parameter and no named activation."),
        ("px.search(task, optimizer, data, '8xH100-80GB')", "MachineError",
         "machine='8xH100-80GB', and must be a plurax.Machine"),
    ],
    "Numbers": [
        *(
            (f"px.fit(task, optimizer, data, batch_size=8, {name}={value})", kind, message)
            for name, kind, message in (
                ("epochs", "BatchError", "give the number of passes over the data"),
                ("report_every", "BatchError", "give a whole number of epochs, at least 1."),
                ("checkpoint_every", "BatchError", "give the number of steps between checkpoints"),
            )
            for value in (0, -1, 2.0, True, "'2'")
        ),
        ("px.fit(task, optimizer, data, batch_size=8.0)", "BatchError",
         "batch_size=8.0: give the number of examples of a step"),
        ("px.fit(task, optimizer, data, batch_size=True)", "BatchError",
         "batch_size=True: give the number of examples of a step"),
        *(
            (f"px.fit(task, optimizer, data, batch_size=8, seed={value})", "TaskError",
             "give a whole number from 0 to 2**32 - 1.")
            for value in ("-1", "2**33 + 5", "0.5", "True", "'a'", "None")
        ),
        ("px.fit(task, optimizer, data, batch_size=8, shuffle='no')", "BatchError",
         "shuffle='no': give True for a new order each epoch, or False."),
        ("program.predict(program.init(), {})", "BatchError", "the batch has no arrays"),
        ("px.fit(task, optimizer, {'x': None}, batch_size=8)", "BatchError",
         "the batch has no arrays"),
        ("program.predict(program.init(), data, chunk=-1)", "BatchError",
         "chunk=-1: give the number of inputs at a time"),
        ("program.predict(program.init(), data, chunk=0)", "BatchError",
         "chunk=0: give the number of inputs at a time"),
        ("program.init(seed=2**33 + 5)", "TaskError", "give a whole number from 0 to 2**32 - 1."),
    ],
    "Before the first step": [
        ("px.fit(other(evaluate=lambda params, batch: batch['y'].mean()), optimizer, data, "
         "batch_size=8, evaluation=data)", "TaskError", "Task.evaluate"),
        ("px.fit(task, optimizer, data, batch_size=8, evaluation={'x': data['x']})", "BatchError",
         "a batch of the evaluation does not fit the program"),
        ("px.fit(task, optimizer, [{'x': [[1.0], [2.0]], 'y': [1.0, 2.0]}])", "BatchError",
         "batch[x] is a list of 2 items, and what a batch holds is arrays."),
        ("px.fit(px.Task(init=lambda key: None, loss=loss), optimizer, data, batch_size=8)",
         "TaskError", "Task.init returned None, and must return the parameters"),
        ("px.fit(task, optimizer, data, batch_size=8, evaluation=iter([data]))", "BatchError",
         "which can be read only once"),
        ("px.fit(task, optimizer, data, batch_size=8, evaluation=[])", "BatchError",
         "the batch has no arrays, or no examples"),
        ("px.fit(task, optimizer, {'x': [[1.0], [2.0, 3.0]], 'y': [1.0, 2.0]}, batch_size=8)",
         "BatchError", "data['x'] is a list of lists of different lengths, and an array has one"),
        ("px.fit(task, optimizer, 'table.csv', batch_size=8)", "BatchError",
         "data='table.csv' is no file that plurax reads: .npy, .npz, .parquet, .arrow, .feather"),
        ("px.fit(task, optimizer, data, batch_size=8, output='file.txt')", "CheckpointError",
         "file.txt could not be written to: file.txt is a file, and output is a directory."),
        ("px.fit(task, optimizer, data, batch_size=8, output='file.txt/run')", "CheckpointError",
         "file.txt/run could not be written to: "),
        ("px.fit(task, optimizer, data, batch_size=8, output='gs://bucket/run')",
         "CheckpointError", "plurax writes to the file system of this machine, and gs:// is"),
        ("px.fit(task, optimizer, data, batch_size=8, output='/proc/run')", "DiskError",
         "could not be written to /proc/run"),
    ],
}  # fmt: skip

# What is given to `plurax`, the exit status, and words of the message. The files are those of
# test_mistakes.py: `small.py` is a good experiment, `trained` the output of its run.
COMMANDS = {
    "The command and the file": [
        ("nwe small.py", 2, "'nwe' is not a command. Did you mean 'new'?"),
        ("tran small.py", 2, "'tran' is not a command. Did you mean 'train'?"),
        ("train", 2, "name the experiment file: plurax train FILE"),
        ("train missing.py", 2, "missing.py: no such file"),
        ("train empty.py", 2, "empty.py does not define experiment()"),
        ("train wrong.py", 2, "experiment() returned int; it must return plurax.Experiment"),
        ("train members_of_five.py", 2, "the members are a int; write members=plurax.Members(5)."),
        ("train plan_of_dict.py", 2, "the plan is a dict, and must be a plurax.Plan."),
        ("train annotated.py", 2, "annotated.py could not be loaded: NameError: name 'Width' is"),
        ("train broken.py", 2, "broken.py could not be loaded: File"),
        ("train syntax.py", 2, "syntax.py could not be loaded: File"),
        ("train imports.py", 2, "No module named 'not_installed'"),
        ("train leaves.py", 2, "leaves.py ends the process before anything is trained"),
        ("train raises.py", 2, "your code raised an exception: File"),
        ("train small.py --epoch 3", 2, "--epochs INT"),
        ("train small.py --epochs many", 2, "many"),
    ],
    "Folders and new files": [
        ("train .", 2, ". is a folder without a run.toml, so it is not that of a run."),
        ("verify trained none.py", 2, "none.py: no such file"),
        ("new small.py", 2, "small.py is there already, and is not written over."),
        ("new /proc/no/a.py", 2, "/proc/no/a.py could not be written"),
        ("examples digit", 2, "'digit' is not an example. Did you mean 'digits'?"),
        ("completion nushell", 2, "zsh"),
    ],
    "Numbers": [
        ("train small.py --epochs 0", 2, "epochs=0: give the number of passes"),
        ("train small.py --batch-size -4", 2, "batch_size=-4: give the number of examples"),
        ("train small.py --report-every 0", 2, "report_every=0: give a whole number of epochs"),
        ("train small.py --check-replicas-every 0", 2, "check_replicas_every=0: give the number"),
        ("train small.py --checkpoint-every 0", 2, "checkpoint_every=0: give the number of steps"),
        ("train small.py --seed -1", 2, "seed=-1: give a whole number from 0"),
        ("train small.py --members.seeds 0", 2, "a population needs at least one member"),
        ("train small.py --members.seeds -1", 2, "Members(seeds=-1): give a number of members"),
        ("train small.py --members.folds 0", 2, "plurax.ensemble.kfold(0): at least 2 folds"),
        ("predict small.py --inputs good.npz --output trained --chunk -1", 2,
         "chunk=-1: give the number of inputs at a time"),
        ("plan small.py --batch-size -4", 2, "batch_size=-4: give the number of examples"),
        ("verify small.py --batch-size 0", 2, "batch_size=0: give the number of examples"),
        ("verify small.py --steps 0", 2, "steps=0: give a whole number of steps, at least 1."),
    ],
    "The plan": [
        ("train small.py --plan.data 9", 2, "needs 9 devices (data=9) and 8 are available"),
        ("train small.py --plan.data 0", 2, "Plan(data=0): data must be a whole number"),
        ("train small.py --plan.schedule gpip", 2, "Did you mean 'gpipe'?"),
        ("plan small.py --plan-file none.toml", 2, "none.toml is not a plan in TOML"),
        ("plan small.py --plan-file float.toml", 2, "Plan(zero=3.0): zero must be one of"),
        ("train small.py --devices many", 2, "--devices many: give a number"),
        ("plan small.py --devices 0", 2, "0 virtual devices: give a whole number of at least 1"),
        ("plan small.py --members.seeds 2 --plan.chunk 1 --plan.batch-dim major "
         "--tune /proc/no.toml", 2, "/proc/no.toml could not be written"),
        ("train small.py --plan.member 2", 2, "splits the members of a population"),
    ],
    "Machines": [
        ("machine --preset 8xA100", 2, "Did you mean '8xA100-80GB'?"),
        ("machine --nodes 4", 2, "--nodes 4 is for published hardware: --preset"),
        ("machine --preset V100-32GB --measure", 2, "prints published rates; --measure"),
        ("plan small.py --compile-for 8xH100 --devices 4", 2,
         "--devices makes devices here, and --compile-for 8xH100 names all that there are."),
        ("plan small.py --compile-for 8xH100 --machine 8xA100-80GB", 2,
         "--machine names the machine of an estimate, and --compile-for 8xH100 has its own."),
    ],
    "The user's functions": [
        ("train loss_raises.py", 2, "return jnp.dot(batch['x'], params['w'])"),
        ("train init_raises.py", 2, "KeyError: 'width'"),
        ("train loss_scalar.py", 2, "returned a value of shape (); it must return one loss per"),
    ],
    "Inputs and output": [
        ("predict small.py --inputs none.npz --output trained", 2,
         "none.npz: no such file; --inputs wants a .npy or .npz file."),
        ("predict small.py --inputs hello.npy --output trained", 2,
         "hello.npy is not a .npy or .npz file of plain arrays"),
        ("predict small.py --inputs empty.npz --output trained", 2,
         "empty.npz is not a .npy or .npz file of plain arrays"),
        ("predict small.py --inputs nothing.npz --output trained", 2, "the batch has no arrays"),
        ("predict small.py --inputs good.npz --output trained --members.seeds 3", 2,
         "the checkpoint holds one network, and a population of 3 is asked for."),
        ("predict small.py --inputs keys.npz --output trained", 2,
         "keys.npz holds: z: float32[2,3] the data of the experiment hold: x: "),
        ("predict small.py --inputs width.npz --output trained", 2,
         "the task's predict cannot take what width.npz holds"),
        ("predict small.py --inputs good.npz --output none", 2, "none holds no checkpoint"),
        ("predict small.py --inputs good.npz --output trained --predictions /proc/no/p.npy", 2,
         "/proc/no/p.npy could not be written"),
        ("train small.py --output file.txt", 2, "file.txt is a file, and output is a directory"),
        ("train small.py --output gs://bucket/run", 2, "gs:// is another"),
        ("train small.py --output /proc/run", 2, "could not be written"),
        ("train small.py --output trained", 2, "to start anew, pass restart=True (--restart)"),
    ],
}  # fmt: skip


def page() -> str:
    """The page of the documentation."""
    lines = [
        "# Common mistakes",
        "",
        "What plurax says to what is often written, before a step is taken.",
        "Every row is run by the tests (`tests/unit/test_mistakes.py`); this page is printed by "
        "`python -m tests.mistakes`.",
        "",
        "A mistake in your own functions or file is shown with your own lines, and no others, in a "
        "script and on the command line; `JAX_TRACEBACK_FILTERING=off` shows all of a script's.",
        "Where plurax shows a whole traceback, the mistake is ours: please report it.",
        "",
        "## In Python",
    ]
    for title, rows in PYTHON.items():
        lines += ["", f"### {title}", "", "| written | error | its message says |", "|---|---|---|"]
        lines += [f"| `{_cell(a)}` | `{b}` | {_cell(c)} |" for a, b, c in rows]
    lines += ["", "## On the command line", "", "Each of these ends with status 2."]
    for title, commands in COMMANDS.items():
        lines += [
            "",
            f"### {title}, as options",
            "",
            "| `plurax` | its message says |",
            "|---|---|",
        ]
        lines += [f"| `{_cell(a)}` | {_cell(c)} |" for a, _, c in commands]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text


if __name__ == "__main__":
    print(page(), end="")
