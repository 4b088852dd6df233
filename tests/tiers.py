"""Which tests wait for `.ci/run`.

A test without a mark runs in `make test`. `GANGS` wait for processes (`make test-gangs`), `CI` are
whole pages, further cases of a contract, and a few contracts that take long (`make test-ci`);
`.ci/run` runs both. Tests marked `slow` draw many rounds (`make test-all`).

A line is the beginning of a test's id: a folder, a file, a function, or one of its cases.
"""

GANGS = (
    "tests/faults/test_gangs.py",
    "tests/faults/test_kills.py",
    "tests/faults/test_launches.py",
    "tests/faults/test_loaders.py",
    "tests/faults/test_network.py",
    "tests/processes/",
    "tests/resume/test_server_deaths.py",
    "tests/resume/test_watched.py",
    "tests/unit/test_launch_ray.py",
    "tests/unit/test_notebooks.py",
)
"""Real gangs of processes, a real cluster of Ray, kernels of notebooks: they wait for each other
more than they compute."""

PAGES = (
    "tests/test_documents.py::test_the_page_runs[docs/choosing-a-plan/",
    "tests/test_documents.py::test_the_page_runs[docs/coming-from/",
    "tests/test_documents.py::test_the_page_runs[docs/faq.md",
    "tests/test_documents.py::test_the_page_runs[docs/guides/",
    "tests/test_documents.py::test_the_page_runs[docs/how-do-i.md",
    "tests/test_documents.py::test_the_doctests_run",
    "tests/test_examples.py",
)
"""Code of pages and examples; README, tutorial and the pages of the API run in `make test`."""

PROCESSES = (
    "tests/resume/test_kill.py",
    "tests/resume/test_power.py",
    "tests/resume/test_two_runs.py",
    "tests/unit/test_export_predict.py::test_in_a_process_that_has_no_plurax",
)
"""A process for each case; what a process does after its end is tested in one for all as well."""

FURTHER = (
    "tests/hlo/test_members.py::test_data_memory_does_not_depend_on_the_members",
    "tests/hlo/test_members.py::test_members_never_communicate[Plan(member=4)]",
    "tests/hlo/test_planned_bytes.py::"
    "test_a_compiled_step_communicates_what_was_planned[stages, language model",
    "tests/hlo/test_planned_bytes.py::"
    "test_a_compiled_step_communicates_what_was_planned[stages, reduced in bfloat16",
    "tests/hlo/test_stages_hlo.py::test_fewer_layers_in_early_stages_store_less",
    "tests/hlo/test_stages_hlo.py::test_gradients_of_stages_reduce_once[numbers_of_layers1]",
    "tests/hlo/test_stages_hlo.py::test_stages_exchange_only_permutes_of_boundaries[gpipe]",
    "tests/hlo/test_stages_hlo.py::test_stages_exchange_only_permutes_of_boundaries[zb-h1]",
    "tests/parity/test_coupled.py::test_every_parallelism[experts-tensor]",
    "tests/parity/test_coupled.py::test_every_parallelism[normed-everything]",
    "tests/parity/test_coupled.py::test_every_parallelism[normed-zero 2]",
    "tests/parity/test_coupled.py::test_model_state_under_another_plan[plans0]",
    "tests/parity/test_coupled.py::test_stages[running-remat]",
    "tests/parity/test_divided.py::test_a_model_that_communicates_itself[2-2]",
    "tests/parity/test_divided.py::test_every_parallelism_in_float32[convolutional-tensor]",
    "tests/parity/test_divided.py::test_every_parallelism_in_float32[transformer-everything]",
    "tests/parity/test_divided.py::test_members_split_too[plan1]",
    "tests/parity/test_divided.py::test_members_split_too[plan2]",
    "tests/parity/test_divided.py::test_plans_in_float64[zero 1]",
    "tests/parity/test_divided.py::test_plans_in_float64[zero 2]",
    "tests/parity/test_divided.py::test_remat_changes_nothing[transformer-dots]",
    "tests/parity/test_divided.py::test_remat_changes_nothing[transformer-offload]",
    "tests/parity/test_divided.py::test_tensors_without_elements[pipeline]",
    "tests/parity/test_early_reduction.py::test_a_step_is_that_by_hand[one microbatch",
    "tests/parity/test_early_reduction.py::test_a_step_is_that_by_hand[tensor, zero 1-loss]",
    "tests/parity/test_early_reduction.py::test_a_step_is_that_by_hand[tensor-loss]",
    "tests/parity/test_early_reduction.py::test_a_step_is_that_by_hand[two microbatches-loss]",
    "tests/parity/test_early_reduction.py::test_a_step_is_that_by_hand[zero 1",
    "tests/parity/test_early_reduction.py::"
    "test_layers_are_reduced_in_their_loop_and_nothing_is_sent_twice[tensor, zero 1]",
    "tests/parity/test_early_reduction.py::"
    "test_layers_are_reduced_in_their_loop_and_nothing_is_sent_twice[two microbatches]",
    "tests/parity/test_freezing.py::test_as_by_hand[head-1f1b]",
    "tests/parity/test_freezing.py::test_as_by_hand[layers-zb-h1]",
    "tests/parity/test_freezing.py::test_as_by_hand[marked-zero 2 in stages]",
    "tests/parity/test_freezing.py::test_as_by_hand[stack-1f1b]",
    "tests/parity/test_freezing.py::test_search_and_verify_take_frozen_parameters",
    "tests/parity/test_freezing.py::test_stages_sum_no_gradient_of_frozen_parameters[layers]",
    "tests/parity/test_freezing.py::test_stages_sum_no_gradient_of_frozen_parameters[marked]",
    "tests/parity/test_halves.py::test_a_step_is_its_halves_bit_for_bit[members and data]",
    "tests/parity/test_halves.py::test_a_step_is_its_halves_bit_for_bit[tensor]",
    "tests/parity/test_members_parity.py::test_among_others_equals_alone[bootstrap-Plan(data=3",
    "tests/parity/test_members_parity.py::test_among_others_equals_alone[everything-Plan(chunk=1)",
    "tests/parity/test_members_parity.py::test_other_resampling_equals_alone[kfold]",
    "tests/parity/test_members_parity.py::test_other_resampling_equals_alone[subsample]",
    "tests/parity/test_pipelines.py::test_every_schedule[marked-eager-1f1b-3]",
    "tests/parity/test_pipelines.py::test_every_schedule[marked-gpipe-4]",
    "tests/parity/test_pipelines.py::test_every_schedule[marked-interleaved-8]",
    "tests/parity/test_pipelines.py::test_every_schedule[marked-zb-h1-3]",
    "tests/parity/test_pipelines.py::test_every_schedule[perceptron-eager-1f1b-8]",
    "tests/parity/test_pipelines.py::test_every_schedule[transformer-gpipe-2]",
    "tests/parity/test_pipelines.py::test_every_schedule[transformer-interleaved-3]",
    "tests/parity/test_pipelines.py::test_every_schedule[transformer-zb-h1-4]",
    "tests/parity/test_pipelines.py::test_every_schedule_in_float32",
    "tests/parity/test_pipelines.py::test_hybrids[1f1b]",
    "tests/parity/test_pipelines.py::test_hybrids[eager-1f1b]",
    "tests/parity/test_pipelines.py::test_hybrids[few layers last]",
    "tests/parity/test_pipelines.py::test_hybrids[interleaved]",
    "tests/parity/test_pipelines.py::test_hybrids[unequal parts]",
    "tests/parity/test_pipelines.py::test_members_in_stages[plan1]",
    "tests/parity/test_pipelines.py::test_optimizers_where_tensors_live[by block]",
    "tests/parity/test_pipelines.py::test_optimizers_where_tensors_live[trust ratio]",
    "tests/parity/test_pipelines.py::test_verify_in_stages[perceptron]",
    "tests/parity/test_servers_cut.py::"
    "test_rows_change_nothing_in_a_run_on_one_worker[{'mode': 'sync', 'compression': 'topk'}]",
    "tests/parity/test_servers_cut.py::"
    "test_servers_with_rows_beside_a_step_by_hand[adaptive_grad_clip",
    "tests/parity/test_servers_cut.py::test_servers_with_rows_beside_a_step_by_hand[add_noise]",
    "tests/parity/test_servers_cut.py::"
    "test_servers_with_rows_beside_a_step_by_hand[apply_if_finite]",
    "tests/parity/test_servers_cut.py::"
    "test_servers_with_rows_beside_a_step_by_hand[conditionally_transform",
    "tests/parity/test_servers_cut.py::test_servers_with_rows_beside_a_step_by_hand[contrib.",
    "tests/parity/test_servers_cut.py::test_servers_with_rows_beside_a_step_by_hand[masked",
    "tests/parity/test_servers_parity.py::test_a_run_goes_on_elsewhere",
    "tests/parity/test_servers_parity.py::test_a_worker_may_be_a_pipeline",
    "tests/parity/test_servers_parity.py::test_a_worker_may_have_any_plan[microbatches and zero]",
    "tests/parity/test_strategies.py::test_drawn_strategies_give_the_same_update[stacked-2-3-3]",
    "tests/unit/test_batch_size.py::test_found_fits_and_next_does_not[task0-plan0]",
    "tests/unit/test_batch_size.py::test_found_fits_and_next_does_not[task1-plan1]",
    "tests/unit/test_batch_size.py::test_the_budget_has_a_default_on_cpu",
    "tests/unit/test_callbacks.py::test_a_callback_ends_a_run_after_an_epoch[servers]",
    "tests/unit/test_callbacks.py::test_steps_are_limited[servers]",
    "tests/unit/test_found_plans.py::test_the_bytes_of_a_solution_are_those_of_its_plan[stack-2-8]",
    "tests/unit/test_host_calls.py::test_checkpointed_loops_of_equinox_train_alike[False",
    "tests/unit/test_host_calls.py::test_checkpointed_loops_of_equinox_train_alike[True-members]",
    "tests/unit/test_host_calls.py::test_checkpointed_loops_of_equinox_train_alike[True-network]",
    "tests/unit/test_metrics.py::test_a_cut_network_in_stages[task]",
    "tests/unit/test_metrics.py::test_a_stack_in_stages[loss]",
    "tests/unit/test_metrics.py::test_a_stack_in_stages[parts]",
    "tests/unit/test_recorded_collectives.py::"
    "test_what_was_traced_to_compile_says_what_a_recorded_step_says[tensor]",
    "tests/unit/test_replay.py::test_a_resumed_run_is_repeated_from_its_beginning[another",
    "tests/unit/test_replay.py::test_a_resumed_run_is_repeated_from_its_beginning[three times]",
    "tests/unit/test_replay.py::test_a_resumed_run_is_repeated_from_its_beginning[uncompressed",
    "tests/unit/test_replay.py::test_every_run_is_repeated_bit_for_bit[first-topk]",
    "tests/unit/test_replay.py::test_every_run_is_repeated_bit_for_bit[quorum-topk]",
    "tests/unit/test_replicas.py::test_a_flipped_bit_is_found_and_named[data, 8 devices]",
    "tests/unit/test_replicas.py::test_a_flipped_bit_is_found_and_named[members in stages]",
    "tests/unit/test_replicas.py::test_a_flipped_bit_is_found_and_named[members]",
    "tests/unit/test_replicas.py::test_a_flipped_bit_is_found_and_named[pipeline, a stage's own]",
    "tests/unit/test_replicas.py::test_a_flipped_bit_is_found_and_named[pipeline, layers]",
    "tests/unit/test_replicas.py::test_a_flipped_bit_is_found_and_named[tensor and zero]",
    "tests/unit/test_replicas.py::test_a_flipped_bit_is_found_and_named[tensor, split]",
    "tests/unit/test_replicas.py::test_where_there_are_no_copies_nothing_runs[members alone]",
    "tests/unit/test_run_file.py::test_the_best_state_predicts[px.Members(2)]",
    "tests/unit/test_search.py::test_plans_are_ranked_by_what_an_estimate_says[{'pipeline': 2}]",
    "tests/unit/test_servers.py::test_a_prepared_worker_compiles_no_more[pipeline]",
    "tests/unit/test_servers.py::test_a_prepared_worker_compiles_no_more[zero]",
    "tests/unit/test_stages.py::test_what_a_stage_prints_is_printed_once[marked",
    "tests/unit/test_sweep.py::test_a_few_large_members_fit_where_a_chunk_does_not",
    "tests/unit/test_sweep.py::test_frozen_members_are_the_first_to_go",
    "tests/unit/test_timeline.py::test_layers_of_each_stage_and_a_schedule_by_hand",
    "tests/zoo/test_found.py",
    "tests/zoo/test_recorded.py::test_what_is_recorded_is_what_is_compiled[bilstm-dots]",
    "tests/zoo/test_recorded.py::"
    "test_what_is_recorded_is_what_is_compiled[contrastive-pipeline and zero]",
    "tests/zoo/test_recorded.py::"
    "test_what_is_recorded_is_what_is_compiled[diffusion-pipeline and tensor]",
    "tests/zoo/test_recorded.py::test_what_is_recorded_is_what_is_compiled[experts-full]",
    "tests/zoo/test_recorded.py::"
    "test_what_is_recorded_is_what_is_compiled[fourier-pipeline and tensor]",
    "tests/zoo/test_recorded.py::test_what_is_recorded_is_what_is_compiled[implicit-pipeline]",
    "tests/zoo/test_recorded.py::"
    "test_what_is_recorded_is_what_is_compiled[spiking-pipeline and zero]",
    "tests/zoo/test_recorded.py::"
    "test_what_is_recorded_is_what_is_compiled[vision transformer-tensor]",
    "tests/zoo/test_zoo.py::test_as_by_hand[autoregressive-members and zero]",
    "tests/zoo/test_zoo.py::test_as_by_hand[autoregressive-pipeline]",
    "tests/zoo/test_zoo.py::test_as_by_hand[batch norm-zero 1]",
    "tests/zoo/test_zoo.py::test_as_by_hand[bilstm-dots]",
    "tests/zoo/test_zoo.py::test_as_by_hand[branch-members minor]",
    "tests/zoo/test_zoo.py::test_as_by_hand[contrastive-pipeline and zero]",
    "tests/zoo/test_zoo.py::test_as_by_hand[diffusion-pipeline and tensor]",
    "tests/zoo/test_zoo.py::test_as_by_hand[equilibrium-tensor]",
    "tests/zoo/test_zoo.py::test_as_by_hand[experts-full]",
    "tests/zoo/test_zoo.py::test_as_by_hand[fourier-pipeline and tensor]",
    "tests/zoo/test_zoo.py::test_as_by_hand[graph-full]",
    "tests/zoo/test_zoo.py::test_as_by_hand[gru-zero 3]",
    "tests/zoo/test_zoo.py::test_as_by_hand[implicit-pipeline]",
    "tests/zoo/test_zoo.py::test_as_by_hand[implicit-tensor and zero]",
    "tests/zoo/test_zoo.py::test_as_by_hand[neural ode-everything]",
    "tests/zoo/test_zoo.py::test_as_by_hand[pinn-zero 2]",
    "tests/zoo/test_zoo.py::test_as_by_hand[recommender-zero 1]",
    "tests/zoo/test_zoo.py::test_as_by_hand[spiking-data]",
    "tests/zoo/test_zoo.py::test_as_by_hand[spiking-pipeline and zero]",
    "tests/zoo/test_zoo.py::test_as_by_hand[state space-members]",
    "tests/zoo/test_zoo.py::test_as_by_hand[unet-zero 2]",
    "tests/zoo/test_zoo.py::test_as_by_hand[vision transformer-tensor]",
    "tests/zoo/test_zoo_servers.py::test_servers_take_the_step_written_by_hand[autoregressive]",
    "tests/zoo/test_zoo_servers.py::test_servers_take_the_step_written_by_hand[contrastive]",
)
"""Further cases, of which others are in `make test`; without a case, contracts that take long."""

CI = PAGES + PROCESSES + FURTHER
