"""Which test holds which fault of a long run: the list, and that every test of it is there."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

FAULTS = {
    "1 kill -9 at any moment, in saves and between": (
        "resume/test_kill.py: two_hundred_kills killed_between_saves killed_in_a_save",
        "faults/test_kills.py: many_kills",
    ),
    "2 kill -9 of one rank inside a save of several": (
        "faults/test_kills.py: processes_and_the_launcher_are_killed many_kills",
    ),
    "3 kill between data, marker and rename": (
        "resume/test_kill.py: nothing_is_ever_half_visible",
    ),
    "4 a file cut short, deleted, empty": (
        "unit/test_checkpoint.py: a_torn_description_is_damage "
        "any_file_that_is_changed_or_missing_is_noticed_or_not_needed",
        "unit/test_fit.py: a_damaged_checkpoint_is_set_aside_and_the_one_before_taken",
    ),
    "5 flipped bits on the disk": (
        "unit/test_checkpoint.py: one_or_two_flipped_bits_show "
        "any_file_that_is_changed_or_missing_is_noticed_or_not_needed "
        "values_that_were_wrong_when_they_were_written_are_noticed",
    ),
    "6 leftovers, bare folders, locks of the dead": (
        "unit/test_fit.py: an_empty_directory_of_that_name_is_no_checkpoint",
        "unit/test_checkpoint.py: only_the_writer_removes_what_was_left_unfinished "
        "who_may_take_a_lock a_live_process_keeps_it_and_a_killed_one_does_not",
    ),
    "7 a full disk": (
        "resume/test_disk.py: a_real_disk_is_full_at_the_start a_real_disk_is_full_for_some_epochs "
        "a_real_disk_has_no_room_for_the_log training_stops_after_some_failures_in_a_row",
        "faults/test_gangs.py: a_full_disk_stops_no_process",
    ),
    "8 a disk that is read-only, slow or gone": (
        "resume/test_disk.py: a_real_disk_is_read_only_for_some_epochs "
        "a_slow_disk_does_not_hold_up_training "
        "a_disk_that_does_not_answer_is_not_waited_for_forever "
        "nothing_is_written_where_a_disk_was_mounted a_folder_that_is_removed_is_created_anew",
        "faults/test_gangs.py: an_output_that_is_not_shared_is_refused",
    ),
    "9 SIGTERM at any moment, and twice": (
        "faults/test_launches.py: "
        "a_signal_to_a_process_is_cured_and_one_to_the_launcher_is_obeyed",
        "faults/test_gangs.py: a_signal_to_one_process_stops_all_at_one_step "
        "a_signal_at_any_moment a_second_signal_ends_a_process_and_the_others_notice",
        "unit/test_fit.py: a_signal_saves_and_resume_is_bit_equal "
        "a_second_signal_ends_a_run_whose_data_block",
        "unit/test_stop_signals.py: a_script_that_gets_sigterm_ends_with_its_checkpoint "
        "what_a_signal_does_once_all_is_saved a_fit_within_a_fit_stops_both",
        "unit/test_reaper.py: ray_does_not_replace_the_handler_that_saves",
        "unit/test_launch.py: a_signal_reaches_all_processes a_second_signal_kills",
    ),
    "10 kill -9 of a rank, of the coordinator, of the launcher": (
        "faults/test_kills.py: processes_and_the_launcher_are_killed all_are_killed_together",
        "unit/test_launch.py: nothing_outlives_a_launcher_that_is_killed "
        "the_trace_of_a_process_whose_peer_died_is_only_in_its_file",
        "unit/test_locked_folder.py: the_next_removes_what_a_killed_process_has_left",
        "unit/test_launch_hosts.py: a_lost_host_may_come_back a_lost_leader_may_come_back",
    ),
    "11 a rank that hangs, is stopped, holds the GIL": (
        "resume/test_watched.py: a_fault_is_named_and_the_run_ends_as_if_it_had_not_been",
        "unit/test_watchdog.py: "
        "a_process_that_waits_for_a_lock_is_ended_and_its_stacks_are_written",
        "unit/test_launch.py: a_stopped_process_is_named "
        "a_process_that_holds_the_interpreter_is_named_and_writes_its_stacks",
    ),
    "12 a network that is cut or slow": (
        "faults/test_network.py: two_hosts_end_as_one the_link_is_down_for_a_moment "
        "the_link_is_lost_until_the_launchers_notice "
        "the_link_is_lost_with_the_limits_of_a_real_run a_slow_link "
        "the_link_to_a_host_of_a_cluster_is_lost",
        "unit/test_launch_ray.py: an_actor_that_is_lost_or_silent_is_started_again",
        "unit/test_launch_hosts.py: a_silent_connection_is_lost_and_a_living_one_says_so "
        "a_full_network_is_not_waited_for",
        "unit/test_distributed.py: a_process_that_ended_is_named a_process_that_is_late_is_named",
    ),
    "13 a host name that is loopback": (
        "faults/test_network.py: the_name_of_the_leader_is_loopback "
        "the_name_of_a_host_is_loopback",
        "unit/test_launch_hosts.py: a_name_that_only_this_host_reaches",
        "unit/test_distributed.py: a_host_whose_name_is_loopback_is_refused",
    ),
    "14 a loss or gradient that is not finite": (
        "faults/test_gangs.py: rows_of_one_process_that_are_not_finite_change_nothing",
        "unit/test_batch.py: a_non_finite_step_changes_nothing_and_is_counted",
        "unit/test_step.py: a_gradient_that_is_not_finite_under_a_loss_that_is",
        "resume/test_rollback.py: a_run_goes_back_and_skips",
    ),
    "15 a loss that jumps": ("resume/test_rollback.py: a_spike_rolls_back",),
    "16 a flipped bit in one copy of the parameters": (
        "unit/test_replicas.py: a_flipped_bit_is_found_and_named "
        "nothing_poisoned_is_saved_and_the_run_goes_on",
        "resume/test_watched.py: a_fault_is_named_and_the_run_ends_as_if_it_had_not_been",
    ),
    "17, 18, 20 servers, workers and heads of clusters that die": (
        "resume/test_server_deaths.py: every_death_is_survived a_worker_and_a_server_are_killed",
        "unit/test_reaper.py: the_end_of_ray_is_said "
        "marked_processes_end_and_folders_go_with_a_killed_process",
    ),
    "19 pushes that are damaged, twice, too old": (
        "unit/test_servers.py: pushes_drawn_at_random_change_nothing_and_kill_nobody "
        "a_push_is_taken_once a_gradient_that_is_too_stale_is_refused",
    ),
    "21 a wrong token or none": (
        "resume/test_server_deaths.py: another_token_is_refused "
        "a_cluster_without_a_token_is_refused",
        "unit/test_launch_hosts.py: a_host_that_does_not_fit_is_refused "
        "nobody_without_the_secret_gets_a_word a_proof_is_for_one_connection "
        "a_proof_is_for_one_side_one_place_and_its_words a_connection_to_no_launcher_is_closed "
        "several_hosts_need_a_secret a_flood_of_connections_leaves_room_for_a_launcher "
        "a_hello_with_absurd_numbers_is_refused a_report_that_is_none_ends_the_connection",
        "unit/test_distributed.py: strangers_are_not_let_in",
    ),
    "22 a store that is too small": (
        "resume/test_server_deaths.py: a_store_that_is_too_small_is_refused",
        "unit/test_shared_memory.py: no_memory_left_is_an_error_before_anything_is_written",
    ),
    "23 out of memory": (
        "faults/test_launches.py: out_of_memory_is_not_tried_again",
        "unit/test_launch.py: a_kill_for_memory_is_not_tried_again "
        "a_kill_while_the_kernel_counts_one_is_for_memory",
        "unit/test_fit.py: out_of_memory_says_which_plans_need_less",
    ),
    "24 another network, plan or data at the restore; a ragged batch": (
        "unit/test_fit.py: resuming_another_training_is_refused "
        "resuming_another_optimizer_is_refused ragged_policies",
        "resume/test_resume.py: arrays_of_another_length_are_refused",
        "processes/test_processes.py: fit_as_in_one_process",
    ),
    "25 a clock that jumps": (
        "resume/test_disk.py: a_clock_that_jumps_changes_nothing "
        "no_wait_is_measured_by_the_clock_of_the_wall",
    ),
    "26 a restore on other devices, processes, plans": (
        "processes/test_processes.py: restore_matrix one_process_restores_what_several_saved",
        "unit/test_fit.py: resuming_under_another_plan_goes_on",
    ),
    "27 a worker of the data loader that dies, data that are short": (
        "faults/test_launches.py: a_file_that_is_short_ends_the_run",
        "resume/test_resume.py: an_iterable_that_has_become_shorter_is_refused",
        "unit/test_read_ahead.py: large_batches_are_read_two_ahead_one_to_a_buffer "
        "errors_of_a_source_come_after_the_batches_before",
        "faults/test_loaders.py: what_is_shared_with_a_worker_is_removed "
        "a_process_or_its_worker_is_killed a_launcher_is_killed",
        "unit/test_launch.py: the_others_are_killed_with_what_they_started",
    ),
    "28 two runs in one folder, two at one port": (
        "faults/test_launches.py: a_folder_that_another_run_writes_is_not_tried_again "
        "a_port_that_is_taken_meanwhile",
        "faults/test_gangs.py: a_folder_that_another_run_writes_is_refused_in_all_processes",
        "resume/test_two_runs.py: the_second_run_is_refused_and_has_written_nothing",
        "unit/test_launch_hosts.py: two_leaders_at_one_address",
    ),
}  # fmt: skip
"""Each fault, and the tests that hold what happens then: `FILE: TEST TEST`, without `test_`."""


def named():
    for fault, rows in FAULTS.items():
        for row in rows:
            file, tests = row.split(": ")
            for test in tests.split():
                yield pytest.param(file, f"test_{test}", id=f"{fault.split()[0]}-{test}")


def test_the_list_is_whole():
    numbers = [int(n) for fault in FAULTS for n in fault.replace(",", "").split() if n.isdecimal()]
    assert sorted(numbers) == [*range(1, 29)]


@pytest.mark.parametrize(("file", "test"), [*named()])
def test_a_fault_has_its_test(file, test):
    tree = ast.parse((TESTS / file).read_text())
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
